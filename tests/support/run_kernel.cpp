// Runs one kernel on arguments from files, for processors that the tests only emulate.
//
// usage: run_kernel OPERATION DTYPE FOLDER INTEGER...     FOLDER has the operands 0, 1, ...; the result becomes `out`

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "kernels.h"

using namespace raycore;

static void serial(int64_t count, int64_t, RangeFunction function, void* context) {
  if (count) function(0, count, context);
}

int main(int argc, char** argv) {
  const std::string operation = argv[1], folder = argv[3];
  const int dtype = std::atoi(argv[2]), size = dtype == kFloat32 ? 4 : 2;
  std::vector<int64_t> n;
  for (int i = 4; i < argc; i++) n.push_back(std::atoll(argv[i]));
  std::vector<std::vector<char>> operands;
  for (int i = 0;; i++) {
    std::ifstream file(folder + "/" + std::to_string(i), std::ios::binary);
    if (!file) break;
    operands.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const auto operand = [&](size_t i) { return operands[i].empty() ? nullptr : operands[i].data(); };
  const Threads threads = {1, serial};
  const Kernels& kernels = kNeonKernels;
  std::vector<char> out;
  const float* numbers = reinterpret_cast<const float*>(operand(0));  // eps, offset, scale, softcap; a gate's alpha and limit
  const auto gate_of = [&](int64_t kind) { return kind ? Gate{GateKind(kind), numbers[0], numbers[1]} : Gate{}; };
  if (operation == "rms_norm") {
    out.resize(n[0] * n[1] * size);
    kernels.rms_norm[dtype]({operand(1), operand(2), out.data(), n[0], n[1], n[1], numbers[0], numbers[1]}, threads);
  } else if (operation == "gate_and_mul") {
    out.resize(n[0] * n[1] * size);
    kernels.gate_and_mul[dtype]({operand(1), out.data(), n[0], n[1], gate_of(n[2])}, threads);
  } else if (operation == "few_rows_linear") {
    out.resize(n[0] * n[2] * size);
    kernels.few_rows_linear[dtype]({operand(1), operand(2), out.data(), n[0], n[1], n[2], n[1]}, threads);
  } else if (operation == "panel_linear") {
    out.resize(n[0] * n[2] / (n[4] ? 2 : 1) * size);
    kernels.panel_linear[dtype][n[3]]({operand(1), operand(2), operand(3), operand(4), out.data(), n[0], n[1], n[2],
                                       n[1], gate_of(n[4])},
                                      threads);
  } else if (operation == "integer_linear" || operation == "float8_linear") {
    IntegerLinearArgs args;
    args.x = operand(1);
    args.packed = reinterpret_cast<const uint8_t*>(operand(2));
    args.scales = reinterpret_cast<const float*>(operand(3));
    args.zeros = n[9] ? nullptr : reinterpret_cast<const uint8_t*>(operand(4));
    args.offsets = n[9] ? reinterpret_cast<const float*>(operand(4)) : nullptr;
    args.bias = operand(5);
    args.residual = operand(6);
    args.num_rows = n[0];
    args.num_inputs = args.x_stride = n[1];
    args.num_outputs = n[2];
    args.bits = n[3];
    args.row_bits = n[4];
    args.row_group_size = n[5] ? n[5] : n[1];
    args.group_size = n[6];
    args.is_e2m1 = n[7] != 0;
    args.gate = gate_of(n[8]);
    out.resize(n[0] * n[2] / (n[8] ? 2 : 1) * size);
    args.out = out.data();
    std::vector<char> scratch(integer_scratch_bytes(args));
    args.scratch = scratch.data();
    (operation == "integer_linear" ? kernels.integer_linear : kernels.float8_linear)[dtype](args, threads);
  } else if (operation == "mask_logits") {
    out = operands[1];
    kernels.mask_logits({reinterpret_cast<float*>(out.data()), reinterpret_cast<const int64_t*>(operand(2)),
                         reinterpret_cast<const uint8_t*>(operand(3)), n[0], n[1], n[2]},
                        threads);
  } else if (operation == "most_likely") {
    out.resize(n[0] * sizeof(int64_t));
    kernels.most_likely[dtype]({operand(1), reinterpret_cast<int64_t*>(out.data()), n[0], n[1], n[1]}, threads);
  } else if (operation == "draw") {
    out.resize(n[0] * sizeof(int64_t));
    std::vector<char> scratch(draw_scratch_bytes(n[1]));
    const auto limits = reinterpret_cast<const DrawLimits*>(operand(2));
    const auto token_ids = reinterpret_cast<int64_t*>(out.data());
    kernels.draw[dtype]({operand(1), limits, scratch.data(), token_ids, n[0], n[1], n[1], 0}, threads);
  } else if (operation == "logprobs") {
    const int64_t num_rows = n[0], num_likely = n[2], count = num_rows * (1 + num_likely);
    out.resize(count * (sizeof(int64_t) + sizeof(float)));
    const auto integers = reinterpret_cast<int64_t*>(out.data());
    const auto floats = reinterpret_cast<float*>(integers + count);
    const auto token_ids = reinterpret_cast<const int64_t*>(operand(2));
    kernels.logprobs[dtype]({operand(1), token_ids, floats, integers, floats + num_rows, integers + num_rows, num_rows,
                             n[1], n[1], num_likely},
                            threads);
  } else if (operation == "gated_delta" || operation == "mamba2") {
    RecurrenceArgs args = {};
    args.x = operand(1);
    args.taps = operand(2);
    args.conv_bias = operand(3);
    args.decay = reinterpret_cast<const float*>(operand(4));
    args.bias = reinterpret_cast<const float*>(operand(5));
    args.skip = reinterpret_cast<const float*>(operand(6));
    args.conv_states = operand(7);
    args.states = reinterpret_cast<float*>(operand(8));
    args.sequences = reinterpret_cast<const StateSequence*>(operand(9));
    args.num_sequences = operands[9].size() / sizeof(StateSequence);
    args.saves = reinterpret_cast<const StateSave*>(operand(10));
    args.num_saves = operands[10].size() / sizeof(StateSave);
    args.num_tokens = n[0];
    args.x_stride = n[1];
    args.num_k_heads = n[2];
    args.num_v_heads = n[3];
    args.k_dim = n[4];
    args.v_dim = n[5];
    args.conv_size = n[6];
    if (operation == "mamba2") args.least_time = numbers[0], args.longest_time = numbers[1];
    out.resize(n[0] * n[3] * n[5] * size);
    args.out = out.data();
    std::vector<float> scratch(recurrence_scratch_numbers(args));
    args.scratch = scratch.data();
    (operation == "mamba2" ? kernels.mamba2 : kernels.gated_delta)[dtype](args, threads);
    for (int i : {7, 8})
      std::ofstream(folder + "/" + std::to_string(i), std::ios::binary).write(operands[i].data(), operands[i].size());
  } else {
    AttentionArgs args;
    args.qkv = operand(1);
    args.norm = operand(2);
    args.turns = reinterpret_cast<const float*>(operand(3));
    args.cache = operand(4);
    args.tables = reinterpret_cast<const int32_t*>(operand(5));
    args.sequences = reinterpret_cast<const Sequence*>(operand(6));
    args.num_sequences = n[0];
    args.table_stride = n[1];
    args.num_heads = n[2];
    args.num_kv_heads = n[3];
    args.head_dim = n[4];
    args.block_size = n[5];
    args.window = n[6];
    args.eps = numbers[0];
    args.norm_offset = numbers[1];
    args.scale = numbers[2];
    args.softcap = numbers[3];
    args.sinks = reinterpret_cast<const float*>(operand(7));
    args.turns_are_of_rows = n[8] != 0;
    args.ends = reinterpret_cast<const int32_t*>(operand(8));
    out.resize(operands[1].size() / (n[2] + 2 * n[3]) * n[2]);
    args.out = out.data();
    (n[7] ? kernels.int8_attention : kernels.attention)[dtype](args, threads);
    std::ofstream(folder + "/4", std::ios::binary).write(operands[4].data(), operands[4].size());
  }
  std::ofstream(folder + "/out", std::ios::binary).write(out.data(), out.size());
}
