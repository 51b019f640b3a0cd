// `torch.ops.slotzero.sample`: checks every tensor by name, then passes raw pointers to sample.cpp.

#include <algorithm>
#include <initializer_list>

#include "sample.h"
#include "tensor.h"

namespace slotzero::sample_binding {
namespace {

const float* floats(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  expect("sample", name, tensor, ScalarType::Float, shape);
  return static_cast<const float*>(tensor.data_ptr());
}

const int32_t* ints(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  expect("sample", name, tensor, ScalarType::Int, shape);
  return static_cast<const int32_t*>(tensor.data_ptr());
}

void sample(Tensor logits, Tensor slots, Tensor positions, Tensor tokens, Tensor temperature,
            Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty,
            Tensor presence_penalty, Tensor frequency_penalty, Tensor seed, Tensor prompt_len,
            Tensor min_tokens, Tensor num_logprobs, Tensor logprobs_mode, Tensor stop_ids,
            Tensor bias_ids, Tensor bias_values, Tensor is_masked, Tensor allowed,
            Tensor tokens_out, Tensor logprobs_out, Tensor top_ids_out, Tensor top_logprobs_out) {
  for (const Tensor* matrix : {&logits, &tokens, &stop_ids, &bias_ids, &allowed, &top_ids_out})
    CHECK(matrix->dim() == 2, "sample: logits, tokens, stop_ids, bias_ids, allowed and ",
          "top_ids_out have 2 dimensions");
  const int64_t rows = logits.size(0), vocab = logits.size(1), slots_all = tokens.size(0);
  const int64_t max_len = tokens.size(1), top_width = top_ids_out.size(1);
  const int64_t stop_width = stop_ids.size(1), bias_width = bias_ids.size(1);
  const int64_t mask_width = allowed.size(1);
  CHECK(vocab > 0, "sample: logits must have a vocabulary");
  CHECK(mask_width * 32 >= vocab, "sample: allowed must have a bit for every token");
  const slotzero::SampleTables tables{
      .tokens = ints(tokens, "tokens", {slots_all, max_len}),
      .temperature = floats(temperature, "temperature", {slots_all}),
      .top_k = ints(top_k, "top_k", {slots_all}),
      .top_p = floats(top_p, "top_p", {slots_all}),
      .min_p = floats(min_p, "min_p", {slots_all}),
      .repetition_penalty = floats(repetition_penalty, "repetition_penalty", {slots_all}),
      .presence_penalty = floats(presence_penalty, "presence_penalty", {slots_all}),
      .frequency_penalty = floats(frequency_penalty, "frequency_penalty", {slots_all}),
      .seed = ints(seed, "seed", {slots_all, 2}),
      .prompt_len = ints(prompt_len, "prompt_len", {slots_all}),
      .min_tokens = ints(min_tokens, "min_tokens", {slots_all}),
      .num_logprobs = ints(num_logprobs, "num_logprobs", {slots_all}),
      .logprobs_mode = ints(logprobs_mode, "logprobs_mode", {slots_all}),
      .stop_ids = ints(stop_ids, "stop_ids", {slots_all, stop_width}),
      .bias_ids = ints(bias_ids, "bias_ids", {slots_all, bias_width}),
      .bias_values = floats(bias_values, "bias_values", {slots_all, bias_width}),
      .is_masked = ints(is_masked, "is_masked", {slots_all}),
      .allowed = ints(allowed, "allowed", {slots_all, mask_width}),
      .max_len = max_len,
      .stop_width = stop_width,
      .bias_width = bias_width,
      .mask_width = mask_width,
  };
  expect("sample", "tokens_out", tokens_out, ScalarType::Int, {rows});
  expect("sample", "logprobs_out", logprobs_out, ScalarType::Float, {rows});
  expect("sample", "top_ids_out", top_ids_out, ScalarType::Int, {rows, top_width});
  expect("sample", "top_logprobs_out", top_logprobs_out, ScalarType::Float, {rows, top_width});
  const slotzero::SampleArgs args{
      .logits = floats(logits, "logits", {rows, vocab}),
      .slots = ints(slots, "slots", {rows}),
      .positions = ints(positions, "positions", {rows}),
      .tables = tables,
      .tokens_out = static_cast<int32_t*>(tokens_out.data_ptr()),
      .logprobs_out = static_cast<float*>(logprobs_out.data_ptr()),
      .top_ids_out = static_cast<int32_t*>(top_ids_out.data_ptr()),
      .top_logprobs_out = static_cast<float*>(top_logprobs_out.data_ptr()),
      .rows = rows,
      .vocab = vocab,
      .top_width = top_width,
  };
  for (int64_t row = 0; row < rows; ++row)
    CHECK(args.slots[row] >= 0 && args.slots[row] < slots_all, "sample: slots[", row,
          "] is ", args.slots[row], ", but the tables have ", slots_all, " rows");
  slotzero::sample_rows(args);
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<sample>(
            "sample(Tensor logits, Tensor slots, Tensor positions, Tensor tokens, Tensor "
            "temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty, "
            "Tensor presence_penalty, Tensor frequency_penalty, Tensor seed, Tensor prompt_len, "
            "Tensor min_tokens, Tensor num_logprobs, Tensor logprobs_mode, Tensor stop_ids, "
            "Tensor bias_ids, Tensor bias_values, Tensor is_masked, Tensor allowed, Tensor(a!) "
            "tokens_out, Tensor(b!) logprobs_out, Tensor(c!) top_ids_out, Tensor(d!) top_logprobs_out) -> ()");

}  // namespace
}  // namespace slotzero::sample_binding
