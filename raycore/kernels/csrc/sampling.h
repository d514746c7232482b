// Masks logits, draws a token from each row of them (temperature, min-p, top-k, top-p, and the draw), and computes log
// probabilities. A row is computed by one thread.
//
// As in picking.py, for the draw a token's weight is e^((logit - largest logit) / temperature), every filter is a least
// weight, and the draw goes through the tokens in the order of the vocabulary. So tokens exactly as likely as the last
// one that a filter keeps are kept too.

#pragma once

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

// The largest weight such that it and all larger ones together reach `wanted`: in number (top-k) or in sum (top-p). 0
// if all weights don't reach it. The weights must be positive, and at most 1; they are overwritten.
//
// Bits of positive numbers are ordered as the numbers are. The weight's bits are found from the highest to the lowest,
// in three parts: each time, the weights with the bits found so far are grouped by the next part.
inline float least_kept(float* weights, int64_t count, double wanted, bool in_number) {
  constexpr int kBits = 10, kGroups = 1 << kBits;
  double groups[kGroups], reached = 0;
  uint32_t found = 0;
  for (int shift = 2 * kBits; shift >= 0; shift -= kBits) {
    std::memset(groups, 0, sizeof(groups));
    int64_t num_left = 0;
    for (int64_t i = 0; i < count; i++) {
      const float weight = weights[i];
      const uint32_t bits = bits_of<uint32_t>(weight) >> shift;
      weights[num_left] = weight;
      if (shift < 2 * kBits && bits >> kBits != found) continue;
      num_left++;
      groups[bits & (kGroups - 1)] += in_number ? 1.0 : weight;
    }
    count = num_left;
    int group = kGroups - 1;
    for (; group >= 0 && reached + groups[group] < wanted; group--) reached += groups[group];
    if (group < 0) return 0;
    found = found << kBits | uint32_t(group);
  }
  return bits_of<float>(found);
}

// Up to kWidth numbers, and minus infinity after them.
template <typename T>
inline Floats load_scores(const T* from, int64_t count) {
  if (count >= kWidth) return load(from);
  Floats x = load_first(from, count);
  for (int64_t lane = count; lane < kWidth; lane++) x[lane] = -kInfinity;
  return x;
}

template <typename T>
inline float highest_of(const T* logits, int64_t dim) {
  Floats top = splat(-kInfinity);
  for (int64_t i = 0; i < dim; i += kWidth) top = maximum(load_scores(logits + i, dim - i), top);
  return maximum(top);
}

// The weights of one row.
class Draw {
 public:
  Draw(int64_t dim, char* scratch) : dim_(dim), num_blocks_((dim + kDrawBlock - 1) / kDrawBlock) {
    sums_ = reinterpret_cast<double*>(scratch);
    weights_ = reinterpret_cast<float*>(sums_ + num_blocks_);
    candidates_ = weights_ + num_blocks_ * kDrawBlock;
    largest_ = candidates_ + num_blocks_ * kDrawBlock;
  }

  template <typename T>
  void weigh(const T* logits, float temperature) {
    const Floats shift = splat(highest_of(logits, dim_)), divisor = splat(temperature);
    const int64_t num_last = dim_ % kWidth;
    const Floats last = load_first(logits + dim_ - num_last, num_last);
    for (int64_t i = 0; i + kWidth <= dim_; i += kWidth)
      store(weights_ + i, exponential((load(logits + i) - shift) / divisor));
    std::memset(weights_ + dim_ - num_last, 0, (num_blocks_ * kDrawBlock - dim_ + num_last) * sizeof(float));
    store_first(weights_ + dim_ - num_last, exponential((last - shift) / divisor), num_last);
    for (int64_t block = 0; block < num_blocks_; block++) {
      Floats block_top = {};
      for (int64_t i = 0; i < kDrawBlock; i += kWidth)
        block_top = maximum(load(weights_ + block * kDrawBlock + i), block_top);
      largest_[block] = maximum(block_top);
    }
  }

  // The least weight that top-k and then top-p keep, of the weights that are at least `least`.
  float least_of_top(float least, int64_t top_k, double top_p) {
    if (top_k < dim_) {
      // the k largest weights are at least as large as the k-th largest of the blocks' maxima
      int64_t count = 0;
      for (int64_t block = 0; block < num_blocks_; block++) {
        candidates_[count] = largest_[block];
        count += largest_[block] > 0;
      }
      const float bound = least_kept(candidates_, count, double(top_k), true);
      count = collect(bound > least ? bound : least);
      const float kth = least_kept(candidates_, count, double(top_k), true);
      least = kth > least ? kth : least;
    }
    if (top_p >= 1) return least;
    const int64_t count = collect(least);
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += candidates_[i];
    // of equal weights at the end, top-k counts only some
    if (count > top_k) sum -= double(count - top_k) * least;
    const float found = least_kept(candidates_, count, top_p * sum, false);
    return found > least ? found : least;
  }

  // The first token at which the running sum of the weights that are at least `least` reaches `share` of their sum.
  int64_t find(float least, double share) {
    double total = 0;
    const Floats bound = splat(least);
    for (int64_t block = 0; block < num_blocks_; block++) {
      Floats sums = {};
      for (int64_t i = 0; i < kDrawBlock; i += kWidth) {
        const Floats weights = load(weights_ + block * kDrawBlock + i);
        sums += weights >= bound ? weights : Floats{};
      }
      sums_[block] = sum(sums);
      total += sums_[block];
    }
    const double wanted = share * total;
    double reached = 0;
    int64_t block = 0;
    for (; block + 1 < num_blocks_ && reached + sums_[block] < wanted; block++) reached += sums_[block];
    int64_t found = block * kDrawBlock;
    for (int64_t i = found; i < dim_ && i < (block + 1) * kDrawBlock; i++) {
      if (weights_[i] < least || weights_[i] == 0) continue;
      found = i;
      reached += weights_[i];
      if (reached >= wanted) break;
    }
    return found;
  }

 private:
  // Collects the positive weights that are at least `least`. Returns how many.
  int64_t collect(float least) {
    int64_t count = 0;
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (largest_[block] < least) continue;
      for (const float *from = weights_ + block * kDrawBlock, *end = from + kDrawBlock; from < end; from++) {
        candidates_[count] = *from;
        count += *from >= least && *from > 0;
      }
    }
    return count;
  }

  int64_t dim_, num_blocks_;
  double* sums_;                    // [num_blocks]
  float *weights_, *candidates_;    // [num_blocks, kDrawBlock], the last block padded with zeros
  float* largest_;                  // [num_blocks]
};

// Sets the logits of tokens that may not come to minus infinity. All others keep their bits.
void mask_logits(const MaskArgs& args, const Threads& threads) {
  Words lane_bits = {};
  for (int lane = 0; lane < kWidth; lane++) lane_bits[lane] = 1u << lane;
  for_rows(args.num_masks, rows_per_thread(args.dim), threads, [&](int64_t index) {
    float* logits = args.logits + args.rows[index] * args.stride;
    const uint8_t* mask = args.masks + index * mask_bytes(args.dim);
    for (int64_t token = 0; token < args.dim; token += 32) {
      uint32_t allowed;
      std::memcpy(&allowed, mask + token / 8, sizeof(allowed));
      if (allowed == 0xffffffffu) continue;  // few tokens are forbidden in free text
      const int64_t end = token + 32 < args.dim ? token + 32 : args.dim;
      for (int64_t i = token; i < end; i += kWidth, allowed >>= kWidth) {
        const Floats x = load_up_to(logits + i, end - i);
        store_up_to(logits + i, ((Words{} + allowed) & lane_bits) != 0 ? x : splat(-kInfinity), end - i);
      }
    }
  });
}

template <typename T>
void draw(const DrawArgs& args, const Threads& threads) {
  const int64_t V = args.dim;
  share_with_workers(args.num_rows, threads, [&](int64_t row, int64_t worker) {
    const DrawLimits& limits = args.limits[row];
    Draw own(V, args.scratch + worker * args.scratch_stride);
    own.weigh(static_cast<const T*>(args.logits) + row * args.stride, float(limits.temperature));
    float least = float(limits.min_p);
    if (limits.top_k < double(V) || limits.top_p < 1)
      least = own.least_of_top(least, int64_t(limits.top_k), limits.top_p);
    args.out[row] = own.find(least, 1 - limits.uniform);
  });
}

// The largest of a row's logits, from the largest on. Of equal ones, the first come first.
class Likely {
 public:
  Likely(float* values, int64_t* ids, int64_t count) : values_(values), ids_(ids), count_(count) {}

  // Whether a logit of `x` would be one of them.
  bool takes(float x) const { return found_ < count_ || (count_ && x > values_[count_ - 1]); }

  void add(float x, int64_t id) {
    int64_t index = found_ < count_ ? found_++ : count_ - 1;
    for (; index > 0 && values_[index - 1] < x; index--) {
      values_[index] = values_[index - 1];
      ids_[index] = ids_[index - 1];
    }
    values_[index] = x;
    ids_[index] = id;
  }

 private:
  float* values_;
  int64_t* ids_;
  int64_t count_, found_ = 0;
};

template <typename T>
void logprobs(const LogprobsArgs& args, const Threads& threads) {
  const int64_t V = args.dim;
  for_rows(args.num_rows, 1, threads, [&](int64_t row) {
    const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
    float* likely_values = args.likely + row * args.num_likely;
    Likely likely(likely_values, args.likely_ids + row * args.num_likely, args.num_likely);
    const float highest = highest_of(logits, V), own = load_first(logits + args.token_ids[row], 1)[0];
    double total = 0;
    Ints above = {};
    for (int64_t block = 0; block < V; block += kDrawBlock) {
      const int64_t size = V - block < kDrawBlock ? V - block : kDrawBlock;
      float scores[kDrawBlock];
      Floats sums = {}, top = splat(-kInfinity);
      for (int64_t i = 0; i < size; i += kWidth) {
        const Floats x = load_scores(logits + block + i, size - i);
        store(scores + i, x);
        sums += exponential(x - splat(highest));
        above -= x > splat(own);
        top = maximum(x, top);
      }
      total += sum(sums);
      if (!likely.takes(maximum(top))) continue;
      for (int64_t i = 0; i < size; i++)
        if (likely.takes(scores[i])) likely.add(scores[i], block + i);
    }
    const float log_total = float(__builtin_log(total));
    args.own[row] = own - highest - log_total;
    for (int64_t i = 0; i < args.num_likely; i++) likely_values[i] = likely_values[i] - highest - log_total;
    int64_t rank = 1;
    for (int lane = 0; lane < kWidth; lane++) rank += above[lane];
    args.ranks[row] = rank;
  });
}

}  // namespace
