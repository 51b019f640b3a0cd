"""The HTTP front door: OpenAI's API over an engine that runs in a process of its own.

app.py                  puts it together; gate.py: what every request passes first
routes_openai.py        chats, completions, models; routes_engine.py: health, metrics, page
protocol.py, replies.py what clients may ask, and what they are told
asks.py, runs.py        from a request to its answers, and those to their last token
answers.py              tokens to text; chat.py, completion.py: the two shapes of it
tools.py                tools in a prompt; tool_calls.py: calls out of an answer
client.py, stream.py    the engine as this process sees it, and one request of it
messages.py             what crosses between the two
process.py              the other process: an engine, and the loop that feeds it
metrics.py, page/       for those who watch
"""
