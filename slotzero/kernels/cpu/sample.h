// Sampling the next token of each row: the arguments, as raw pointers.
//
// slotzero/sampling/reference.py defines the result of a row; this is a fast implementation of it.
#pragma once

#include <cstdint>

namespace slotzero {

// One row per slot; row 0 is neutral. The widths are those of the tensors.
struct SampleTables {
  const int32_t* tokens;  // [slots + 1, max_len]
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const int32_t* seed;  // [slots + 1, 2]
  const int32_t* prompt_len;
  const int32_t* min_tokens;
  const int32_t* num_logprobs;
  const int32_t* logprobs_mode;  // bit 0: of processed logits; bit 1: the logits themselves
  const int32_t* stop_ids;   // [slots + 1, stop_width]
  const int32_t* bias_ids;   // [slots + 1, bias_width]
  const float* bias_values;  // [slots + 1, bias_width]
  const int32_t* is_masked;
  const int32_t* allowed;  // [slots + 1, mask_width], 32 tokens a word
  int64_t max_len, stop_width, bias_width, mask_width;
};

struct SampleArgs {
  const float* logits;       // [rows, vocab]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]: the index that the new token will have
  SampleTables tables;
  int32_t* tokens_out;        // [rows]
  float* logprobs_out;        // [rows]
  int32_t* top_ids_out;       // [rows, top_width]
  float* top_logprobs_out;    // [rows, top_width]
  int64_t rows, vocab, top_width;
};

void sample_row(const SampleArgs& args, int64_t row);
void sample_rows(const SampleArgs& args);

}  // namespace slotzero
