"""The HTTP front door: OpenAI's API over engines that run in processes of their own.

app.py                  puts it together; gate.py: what every request passes first
routes_openai.py        chats, completions, models; routes_engine.py: health, metrics, page
protocol.py, replies.py what clients may send, and what they are told
generation_requests.py, generation.py   from a request to its answers, and those to their last token
answers.py              tokens to text; chat.py, completion.py: the two shapes of it
tools.py                tools in a prompt; tool_calls.py: calls out of an answer
fleet.py, router.py     engines side by side as one, and which of them a request goes to
client.py, stream.py    an engine as this process sees it, and one request of it
share.py, tally.py      what of the machine an engine gets; what several report, as one
messages.py             what crosses between the two
process.py              the other process: an engine, and the loop that feeds it
metrics.py, page/       for those who watch
"""
