// OpenAI's client for Node against a running server: prints all that it was told, as one JSON object.
//
//     node openai_client.mjs '{"url": ..., "key": ..., "model": ..., "messages": [...], "tool": {...}}'
//
// It judges nothing: test_openai_node.py does. An answer is as the client gives it.

import OpenAI from "openai";

const {url, key, model, messages, tool} = JSON.parse(process.argv[2]);
const client = new OpenAI({baseURL: url + "/v1", apiKey: key, maxRetries: 0});
const greedy = {model, temperature: 0, max_tokens: 20};
const random = {temperature: 1, seed: 3, max_tokens: 200};  // a greedy one writes space for ever
const forced = {...random, tools: [tool], tool_choice: "required"};

const chat = (asked) => client.chat.completions.create({...greedy, messages, ...asked});
const complete = (asked) => client.completions.create({...greedy, prompt: "Once", ...asked});

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function refusal(asking) {
  try {
    await asking;
  } catch (error) {
    const {status, code, param, type, message, requestID} = error;
    return {name: error.constructor.name, status, code, param, type, message, requestID};
  }
  return null;
}

async function abort() {
  const stream = await complete({max_tokens: 480, stream: true, ignore_eos: true});
  let chunks = 0;
  for await (const _ of stream) {
    chunks += 1;
    stream.controller.abort();
  }
  return {chunks, after: await complete({})};
}

const whole = await complete({});
const told = {
  models: (await client.models.list()).data,
  chat: await chat({}),
  stream: await all(await chat({stream: true, stream_options: {include_usage: true}})),
  completion: whole,
  several: await complete({n: 3, temperature: 1, seed: 5}),
  stopped: await complete({stop: [whole.choices[0].text.slice(10, 13), "never"]}),
  chatLogprobs: await chat({logprobs: true, top_logprobs: 3}),
  logprobs: await complete({logprobs: 3}),
  call: await chat(forced),
  streamedCall: await all(await chat({...forced, stream: true})),
  structured: await chat({
    ...random,
    response_format: {type: "json_schema", json_schema: {name: "x", schema: tool.function.parameters}},
  }),
  unknownModel: await refusal(chat({model: "gpt-5"})),
  badTemperature: await refusal(chat({temperature: -1})),
  badStream: await refusal(complete({temperature: -1, stream: true})),
  wrongKey: await refusal(client.withOptions({apiKey: "wrong"}).models.list()),
  aborted: await abort(),
};
console.log(JSON.stringify(told));
