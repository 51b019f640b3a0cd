"""The HTTP front door: OpenAI's API over an engine that runs in a process of its own.

app.py        routes; it tokenises, detokenises, streams
client.py     the engine as this process sees it: submit, cancel, watch; restarts it if it dies
messages.py   what crosses between the two
process.py    the other process: an engine, and the loop that feeds it
"""
