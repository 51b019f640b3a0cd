"""The HTTP server: OpenAI's API over engines that run in processes of their own.

app.py                  the application; app_state.py: what its routes share
gate.py                 middleware: request ids, keys, size and time limits, the log line
routes_openai.py        chat completions, completions, models
routes_engine.py        health, metrics, tokenizer, the page
protocol.py, replies.py fields of requests and of replies
generation_requests.py  from an HTTP request to generation requests
generation.py           the answers to one HTTP request, until their last token
answers.py              from tokens to text; chat.py, completion.py: from text to replies
tools.py, tool_calls.py tools in a prompt, and tool calls in an answer
fleet.py                several engines as one; engine/router.py chooses among them
client.py, stream.py    one engine's process, and one request in it
share.py, sum_stats.py  each engine's share of the machine, and the sum of their statistics
messages.py             messages between the two processes
process.py              the engine's process, and the loop that feeds the engine
metrics.py, page/       Prometheus metrics, and the status page
"""
