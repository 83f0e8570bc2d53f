// Sparse MQA decode over packed fp8 pages, for Hopper (sm_90a). Compiled at run time, behind hopper_ptx.cuh, by
// sparse_mqa_cuda.py, which defines HEAD_TILE (8, 16 or 32 query heads a block), CLUSTER (1: the blocks of a cluster
// share one query's keys and merge; 0: one block a query, persistent), STAGES (key tiles in flight) and SHARES (at
// least C * ceil(HEAD_TILE / C) for every cluster size C in use), and from kv_cache.py, which describes the page
// format, GROUPS, DATA_BYTES and SCALE_BYTES (of one key).
//
// One work item is one query token and HEAD_TILE of its heads. A block walks the item's keys in tiles of 64:
//
//   warps 12-15  gather: 16-byte asynchronous copies, key rows into the swizzled layout that wgmma reads
//   warps 0-3    scores: S^T [64 keys x heads] by fp8 wgmma straight from the packed bytes. A query is split into two
//                e4m3 numbers, hi + lo, which hold all 8 significant bits of a bf16; each group of 64 channels has its
//                own accumulator, multiplied by the key's scale in float32. Online softmax in base 2; the
//                probabilities go to shared memory.
//   warps 4-11   values: O^T [channels x heads], a 64-channel group a warp, by mma.sync; e4m3 becomes fp16 in
//                registers (exact), the key's scale multiplies its probability, as an fp16 power of two relative to
//                2**X. X follows the largest scale of each tile, so that every e8m0 scale is usable
//
// Limits. Values: a key's group whose scale is 2**15 or more below 2**X counts as 0. 2**X is at most the group's largest
// scale in the row so far, so that less than 2**-14 of the largest value is lost: little, but all of the result where
// only such keys have weight. Scales further apart than about 2**100 over a row can overflow, as X goes down in several
// steps; headfit's and SGLang's writers store 2**-22 to about 2**8 of normed rows. Scores: above about 2**28, in units
// of log2, float32 rounds a reference so far off that fp16 does not hold the largest probability.

constexpr int TILE = 64;
constexpr int HEADS = HEAD_TILE;
constexpr int NB = HEADS / 8;  // blocks of 8 heads: the N of one mma
static_assert(GROUPS == 7 && DATA_BYTES == GROUPS * 64 + 128 && SCALE_BYTES == 8,
              "7 fp8 groups of 64 channels, then RoPE");
constexpr bool MERGED = HEADS <= 16;  // hi and lo as one wgmma of twice the width

// A head's probabilities are relative to a reference that starts 2**START below its first tile's largest and is raised
// only when one exceeds 2**GROW: rare, so that most tiles need no maximum. fp16 holds both with a scale of 2**5.
constexpr float START = 4.f, GROW = 8.f;
constexpr float UNSET = -1e30f;  // the reference before the first valid key
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

constexpr int WARPS_SCORES = 4, FIRST_VALUES = 4, WARPS_VALUES = 8, FIRST_GATHER = 12, WARPS_GATHER = 4;

struct Region {
  const u8* pages;
  const int* indices;
  const int* lengths;
  i64 index_stride;  // elements
  u32 page_stride;   // bytes
  u32 page_size;
  u32 page_magic, page_shift;  // slot / page_size == __umulhi(2 * slot, magic) >> shift
  int num_keys;
  u32 num_slots;
};

struct Params {
  Region region[2];
  const u16* q;  // bf16
  u16* o;        // bf16
  float* lse;
  const float* sink;
  i64 q_token_stride, q_head_stride, o_token_stride, o_head_stride;  // elements
  int num_heads, head_blocks, num_items;
  u32 block_magic, block_shift;      // item / head_blocks, as a slot's page
  u32 cluster_magic, cluster_shift;  // the same for division by the cluster's size
  float scale_log2;                  // softmax_scale * log2(e)
  int overlap;                       // may the next kernel start before this one ends?
  int pad;
};

// ---- shared memory, bytes -------------------------------------------------------------------------------------------

constexpr int GROUP_BYTES = TILE * 64, ROPE_AT = GROUPS * GROUP_BYTES, STAGE_BYTES = ROPE_AT + TILE * 128;
constexpr int Q_ROWS = 2 * HEADS;  // hi rows, then lo rows
constexpr int P_ROW = 144;         // 64 fp16 and 16 bytes against bank conflicts
constexpr int Q_ROPE_AT = GROUPS * Q_ROWS * 64, Q_BYTES = Q_ROPE_AT + HEADS * 128;
constexpr int Q_BUFFERS = CLUSTER ? 1 : 2;             // a persistent block prepares the next item's query early
constexpr int at_q = STAGES * STAGE_BYTES;             // [buffer]: [group][Q_ROWS][64 bytes], 64-byte swizzle; then
                                                       // [HEADS][128 bytes] of RoPE, 128-byte swizzle
constexpr int at_scales = at_q + Q_BUFFERS * Q_BYTES;  // [stage][key] 8 bytes
constexpr int at_p = at_scales + STAGES * TILE * 8;    // [buffer][head] fp16
constexpr int at_tile_max = at_p + 2 * HEADS * P_ROW;  // [head][warp] float
constexpr int at_sums = at_tile_max + HEADS * 16;      // [item % 2][head][warp] float
constexpr int at_alpha = at_sums + 2 * HEADS * 16;     // [buffer][head] float
constexpr int at_flag = at_alpha + 2 * HEADS * 4;      // [buffer] u32: is there an alpha to apply?
constexpr int at_result = at_flag + 16;                // [head] float4: factor of the values, reference, sum
constexpr int at_q_unit = at_result + HEADS * 16;      // [buffer][head] float: score unit
constexpr int at_valid = at_q_unit + Q_BUFFERS * HEADS * 4;  // [stage][4] u16: which of a warp's 16 keys exist
constexpr int at_bars = at_valid + STAGES * 8;
constexpr int BAR_FULL = at_bars, BAR_EMPTY = BAR_FULL + STAGES * 8, BAR_P_FULL = BAR_EMPTY + STAGES * 8,
              BAR_P_EMPTY = BAR_P_FULL + 16, BAR_DONE = BAR_P_EMPTY + 16, BAR_READ = BAR_DONE + 8,
              BAR_MERGE = BAR_READ + 8, BAR_Q = BAR_MERGE + 8;
// CLUSTER: a block's share of a head is 512 floats, reference and sum. Blocks send them here: [source][owned head].
constexpr int SHARE_SENT = 512 * 4 + 8, SHARE_BYTES = 512 * 4 + 16;
constexpr int at_shares = (BAR_Q + Q_BUFFERS * 8 + 127) / 128 * 128;
constexpr int SMEM_BYTES = at_shares + (CLUSTER ? SHARES * SHARE_BYTES : 0);
static_assert(SMEM_BYTES <= 232448, "shared memory");
static_assert(at_q % 1024 == 0 && Q_ROPE_AT % 1024 == 0 && Q_BYTES % 1024 == 0, "swizzle atoms");

// ---- work items -----------------------------------------------------------------------------------------------------

DEV u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r));
  return CLUSTER ? r : 0;
}
DEV u32 cluster_size() {
  u32 r;
  asm("mov.u32 %0,%%cluster_nctarank;" : "=r"(r));
  return CLUSTER ? r : 1;
}
// A block of a cluster owns, and merges, the heads of its tile from the first one on to the next block's first: of head
// h the owner is h * size / HEADS.
DEV u32 over_cluster(const Params& p, u32 n) {
  return CLUSTER ? __umulhi(2 * n, p.cluster_magic) >> p.cluster_shift : n;
}
DEV int first_owned(const Params& p, u32 rank, u32 size) { return over_cluster(p, rank * HEADS + size - 1); }

DEV int token_of(const Params& p, int item) { return __umulhi(2 * (u32)item, p.block_magic) >> p.block_shift; }
// Loaded early, looked at later.
struct RawLengths {
  int window = 0, compressed = 0;
  DEV void load(const Params& p, int item) {
    const int token = token_of(p, min(item, p.num_items - 1));
    window = ldg32(p.region[0].lengths + token);
    compressed = ldg32(p.region[p.region[1].num_keys > 0].lengths + token);
  }
};
struct Lengths {
  int window, total;
  DEV Lengths(const Params& p, const RawLengths& raw) {
    window = min(max(raw.window, 0), p.region[0].num_keys);
    total = window + min(max(raw.compressed, 0), p.region[1].num_keys);
  }
};
// This block's share of an item: positions [first, last) of the window's keys followed by the compressed ones. It
// depends on the item's own lengths and the cluster's size only.
struct Share {
  int first, last, tiles;
  DEV Share(const Params& p, const Lengths& n, u32 rank) {
    const u32 units = (n.total + 15) >> 4;
    first = over_cluster(p, units * rank) * 16;
    last = min((int)over_cluster(p, units * (rank + 1)) * 16, n.total);
    tiles = (last - first + TILE - 1) / TILE;
  }
  DEV int blocks(int tile) const { return min((last - first - tile * TILE + 15) >> 4, 4); }  // of 16 keys
};
DEV float log_sum(float reference, float sum) {
  return sum == 0.f ? -__int_as_float(0x7f800000) : (reference + log2_(sum)) * LN2;  // NaN stays NaN
}
struct Stage {
  int index = 0;
  u32 phase = 0;
  DEV void next() {
    if (++index == STAGES) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Where a key stands in its page.
struct KeyPlace {
  const u8 *data, *scales;
  DEV KeyPlace(const Region& r, u32 slot) {
    const u32 page = __umulhi(2 * slot, r.page_magic) >> r.page_shift, offset = slot - page * r.page_size;
    const u8* at_page = r.pages + (u64)page * r.page_stride;
    data = at_page + offset * DATA_BYTES;
    scales = at_page + r.page_size * DATA_BYTES + offset * SCALE_BYTES;
  }
};

// The index rows of a token, into L2.
DEV void prefetch_indices(const Params& p, int token, int thread) {
  for (int r = 0; r < 2; r++)
    for (int i = thread * 32; i < p.region[r].num_keys; i += 128 * 32)
      prefetch(p.region[r].indices + token * p.region[r].index_stride + i);
}

// This block's first keys, into L2, for warps 0-3. The lengths are taken to be full, and the indices may still be
// written by the kernel before this one: a wrong row costs a prefetch of some other key and nothing else.
constexpr int EARLY_KEYS = (CLUSTER ? 1 : 2) * TILE;
DEV void prefetch_keys(const Params& p, int item, int warp, int lane) {
  const Lengths full(p, RawLengths{p.region[0].num_keys, p.region[1].num_keys});
  const Share share(p, full, cluster_rank());
  const int i = warp * 32 + lane, position = share.first + i, token = token_of(p, item);
  if (i >= EARLY_KEYS || position >= share.last) return;
  const bool compressed = position >= full.window;
  const Region& r = p.region[compressed];
  // Not from L1: it would be read there again once it has changed.
  const u32 slot = ldg32_l2(r.indices + token * r.index_stride + (position - (compressed ? full.window : 0)));
  if (slot >= r.num_slots) return;
  const KeyPlace at(r, slot);
  prefetch_bulk(at.data, DATA_BYTES);
  prefetch(at.scales);
}

// ---- warps 12-15: gather --------------------------------------------------------------------------------------------

DEV void gather(const Params& p, u32 smem, int warp, int lane) {
  const int chunk = lane & 3, lane_key = (lane >> 4) * TILE + warp * 16 + (lane & 15);
  const u32 rank = cluster_rank();
  const int step = over_cluster(p, gridDim.x);
  Stage stage;
  int tile_count = 0;
  RawLengths raw;
  raw.load(p, over_cluster(p, blockIdx.x));
  for (int item = over_cluster(p, blockIdx.x); item < p.num_items; item += step) {
    const int token = token_of(p, item), num_window = p.region[0].num_keys;
    const int* window_row = p.region[0].indices + token * p.region[0].index_stride;
    const int* compressed_row = p.region[1].indices + token * p.region[1].index_stride;
    // Lane i has key i of this warp's 16 in one tile, lane 16 + i in the next one.
    auto load_pair = [&](int first, int window, int last) {
      const int position = first + lane_key;
      if (position >= last) return -1;
      return ldg32(position < window ? window_row + position : compressed_row + (position - window));
    };
    // The first indices are read before the lengths have arrived, as if index rows were full: they often are.
    const Lengths full_rows(p, RawLengths{num_window, p.region[1].num_keys});
    const Share guess(p, full_rows, rank);
    int pair = load_pair(guess.first, num_window, guess.last);
    int ahead = load_pair(guess.first + 2 * TILE, num_window, guess.last);
    const Lengths n(p, raw);
    const Share share(p, n, rank);
    if (n.total != full_rows.total) {
      pair = load_pair(share.first, n.window, share.last);
      ahead = load_pair(share.first + 2 * TILE, n.window, share.last);
    }
    raw.load(p, item + step);
    if (item + step < p.num_items) prefetch_indices(p, token_of(p, item + step), warp * 32 + lane);
    for (int tile = 0; tile < share.tiles; tile++, tile_count++, stage.next()) {
      if (tile && !(tile & 1)) {
        pair = ahead;
        ahead = load_pair(share.first + (tile + 2) * TILE, n.window, share.last);
      }
      const int slot = __shfl_sync(~0u, pair, (tile & 1) << 4 | (lane & 15));
      const u32 full = smem + BAR_FULL + stage.index * 8;
      const int position = share.first + tile * TILE + warp * 16 + (lane & 15);
      const KeyPlace at(p.region[position >= n.window], max(slot, 0));
      const u32 valid = __ballot_sync(~0u, slot >= 0) & 0xffff;
      if (tile_count >= STAGES) bar_wait(smem + BAR_EMPTY + stage.index * 8, stage.phase ^ 1);
      if (lane == 0) sts16(smem + at_valid + stage.index * 8 + warp * 2, valid);
      if (warp < share.blocks(tile)) {
        if (lane < 16)
          copy8(smem + at_scales + (stage.index * TILE + warp * 16 + lane) * 8, at.scales, slot >= 0 ? 8 : 0);
        const u32 data = smem + stage.index * STAGE_BYTES + warp * 16 * 64, rope = data + ROPE_AT + warp * 16 * 64;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = half * 8 + (lane >> 2);
          const u8* from = (const u8*)__shfl_sync(~0u, (u64)at.data, row) + chunk * 16;
          const u32 bytes = (valid >> row & 1) * 16;
          const u32 to = data + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
#pragma unroll
          for (int g = 0; g < GROUPS; g++) copy16(to + g * GROUP_BYTES, from + g * 64, bytes);
          const u32 to_rope = rope + row * 128 + ((chunk ^ (row & 7)) << 4);
          copy16(to_rope, from + GROUPS * 64, bytes);
          copy16(to_rope ^ 64, from + GROUPS * 64 + 64, bytes);
        }
      }
      bar_arrive_copies(full);
      warp_arrive(full, lane);
    }
  }
}

// ---- warps 0-3: scores ----------------------------------------------------------------------------------------------

// Scale byte g of a key as the float 2**(byte - 127), its last bit set: byte 255 is then NaN and not infinity. Byte 0
// counts as 0.
DEV float scale_of(const uint2& e, int g) {
  return __uint_as_float(__byte_perm(g < 4 ? e.x : e.y, 2, 0x0554 | (g & 3) << 12) >> 1);
}

constexpr int ACC_N = MERGED ? 2 * HEADS : HEADS;
// keys, q: descriptor bases of a stage and of a query buffer
template <int G>
DEV void score_group(float* acc, u32 keys, u32 q) {
  constexpr int k = G * GROUP_BYTES, hi = G * Q_ROWS * 64, lo = hi + HEADS * 64;
  wgmma_fp8<ACC_N>(acc, descriptor<64>(keys, k), descriptor<64>(q, hi), 0);
  wgmma_fp8<ACC_N>(acc, descriptor<64>(keys, k + 32), descriptor<64>(q, hi + 32), 1);
  if (!MERGED) {
    wgmma_fp8<ACC_N>(acc, descriptor<64>(keys, k), descriptor<64>(q, lo), 1);
    wgmma_fp8<ACC_N>(acc, descriptor<64>(keys, k + 32), descriptor<64>(q, lo + 32), 1);
  }
}
template <int G>
DEV void add_group(float* s, const float* acc, const uint2& e0, const uint2& e1) {
  const float s0 = scale_of(e0, G), s1 = scale_of(e1, G);
#pragma unroll
  for (int i = 0; i < 4 * NB; i++) {
    const float scale = i & 2 ? s1 : s0;
    s[i] = fmaf(acc[i], scale, s[i]);
    if (MERGED) s[i] = fmaf(acc[4 * NB + i], scale, s[i]);
  }
}
// S^T of a tile: this thread's keys are rows g and g + 8 of its warp's 16, its heads 8 nb + 2 t and the next;
// s[4 nb + 0..3] = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
DEV void score_tile(float* s, u32 keys, u32 q, const uint2& e0, const uint2& e1) {
  float acc[MERGED ? GROUPS : 4][ACC_N / 2];  // as many as there are registers for
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_bf16<HEADS>(s, descriptor<128>(keys, ROPE_AT + k * 32), descriptor<128>(q, Q_ROPE_AT + k * 32), k > 0);
  score_group<0>(acc[0], keys, q);
  score_group<1>(acc[1], keys, q);
  wgmma_commit();
  score_group<2>(acc[2], keys, q);
  score_group<3>(acc[3], keys, q);
  wgmma_commit();
  if constexpr (MERGED) {
    score_group<4>(acc[4], keys, q);
    score_group<5>(acc[5], keys, q);
    score_group<6>(acc[6], keys, q);
    wgmma_commit();
    wgmma_wait<2>();
    add_group<0>(s, acc[0], e0, e1);
    add_group<1>(s, acc[1], e0, e1);
    wgmma_wait<1>();
    add_group<2>(s, acc[2], e0, e1);
    add_group<3>(s, acc[3], e0, e1);
    wgmma_wait<0>();
    add_group<4>(s, acc[4], e0, e1);
    add_group<5>(s, acc[5], e0, e1);
    add_group<6>(s, acc[6], e0, e1);
  } else {
    wgmma_wait<1>();
    add_group<0>(s, acc[0], e0, e1);
    add_group<1>(s, acc[1], e0, e1);
    wgmma_fence();
    score_group<4>(acc[0], keys, q);
    score_group<5>(acc[1], keys, q);
    wgmma_commit();
    wgmma_wait<1>();
    add_group<2>(s, acc[2], e0, e1);
    add_group<3>(s, acc[3], e0, e1);
    wgmma_fence();
    score_group<6>(acc[2], keys, q);
    wgmma_commit();
    wgmma_wait<1>();
    add_group<4>(s, acc[0], e0, e1);
    add_group<5>(s, acc[1], e0, e1);
    wgmma_wait<0>();
    add_group<6>(s, acc[2], e0, e1);
  }
}

// Over the 8 lanes of a warp that hold a head's keys.
DEV float max_of_head(float v) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
DEV float sum_of_head(float v) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

DEV void scores(const Params& p, u32 smem, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const u32 rank = cluster_rank(), size = cluster_size();
  const int step = over_cluster(p, gridDim.x);
  // A pair of keys (g, g + 8) is one word of P; words are ordered so that the values' loads touch different banks.
  const int word = (g & 1) | (g & 4) >> 1 | (g & 2) << 1;
  Stage stage;
  int tile_count = 0, item_count = 0;
  RawLengths raw;
  raw.load(p, over_cluster(p, blockIdx.x));
  for (int item = over_cluster(p, blockIdx.x); item < p.num_items; item += step, item_count++) {
    const Share share(p, Lengths(p, raw), rank);
    raw.load(p, item + step);
    const int token = token_of(p, item), head0 = (item - token * p.head_blocks) * HEADS;
    float sink[2 * NB];
#pragma unroll
    for (int c = 0; c < 2 * NB; c++)
      sink[c] = CLUSTER ? 0.f : LOG2E * __ldg(p.sink + min(head0 + (c >> 1) * 8 + 2 * t + (c & 1), p.num_heads - 1));
    const int query_buffer = item_count % Q_BUFFERS;
    bar_wait(smem + BAR_Q + query_buffer * 8, item_count / Q_BUFFERS & 1);
    const u32 q = descriptor_base(smem + at_q + query_buffer * Q_BYTES);
    float unit[2 * NB], m[2 * NB], l[2 * NB];
#pragma unroll
    for (int c = 0; c < 2 * NB; c++) {
      unit[c] = ldsf(smem + at_q_unit + (query_buffer * HEADS + (c >> 1) * 8 + 2 * t + (c & 1)) * 4);
      m[c] = UNSET;
      l[c] = 0.f;
    }

    for (int tile = 0; tile < share.tiles; tile++, tile_count++, stage.next()) {
      const int buffer = tile_count & 1;
      bar_wait(smem + BAR_FULL + stage.index * 8, stage.phase);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const u32 scales = smem + at_scales + (stage.index * TILE + warp * 16 + g) * 8;
      const uint2 e0 = lds64(scales), e1 = lds64(scales + 64);
      const u32 valid = lds16(smem + at_valid + stage.index * 8 + warp * 2);
      float s[4 * NB];
      score_tile(s, descriptor_base(smem + stage.index * STAGE_BYTES), q, e0, e1);

      if (valid != 0xffff) {
#pragma unroll
        for (int i = 0; i < 4 * NB; i++)
          if (!(valid >> (i & 2 ? g + 8 : g) & 1)) s[i] = -__int_as_float(0x7f800000);
      }
      bool grow = false;
#pragma unroll
      for (int c = 0; c < 2 * NB; c++) {
        const int i = (c >> 1) * 4 + (c & 1);
        grow |= fmaf(fmaxf(s[i], s[i + 2]), unit[c], -m[c]) > GROW;
      }
      grow = sync_any<2, 128>(grow);
      if (tile_count >= 2) bar_wait(smem + BAR_P_EMPTY + buffer * 8, (tile_count >> 1) - 1 & 1);
      if (grow) {  // new references out of this tile's largest score of each head, over the four warps
#pragma unroll
        for (int c = 0; c < 2 * NB; c++) {
          const int i = (c >> 1) * 4 + (c & 1);
          const float v = max_of_head(fmaxf(s[i], s[i + 2]));
          if (g == 0) stsf(smem + at_tile_max + (((c >> 1) * 8 + 2 * t + (c & 1)) * 4 + warp) * 4, v);
        }
        sync_threads<2, 128>();
#pragma unroll
        for (int c = 0; c < 2 * NB; c++) {
          const int head = (c >> 1) * 8 + 2 * t + (c & 1);
          const uint4 w = lds128(smem + at_tile_max + head * 16);
          const float v = unit[c] * fmaxf(fmaxf(__uint_as_float(w.x), __uint_as_float(w.y)),
                                          fmaxf(__uint_as_float(w.z), __uint_as_float(w.w)));
          const float reference = v > m[c] + GROW ? v - START : m[c], alpha = exp2_(m[c] - reference);
          m[c] = reference;
          l[c] *= alpha;
          if (warp == 0 && g == 0) stsf(smem + at_alpha + (buffer * HEADS + head) * 4, alpha);
        }
      }
      if (warp == 0 && lane == 0) sts32(smem + at_flag + buffer * 4, grow);
      const u32 to = smem + at_p + buffer * HEADS * P_ROW + warp * 32 + word * 4;
#pragma unroll
      for (int c = 0; c < 2 * NB; c++) {
        const int i = (c >> 1) * 4 + (c & 1);
        const float p0 = exp2_(fmaf(s[i], unit[c], -m[c])), p1 = exp2_(fmaf(s[i + 2], unit[c], -m[c]));
        l[c] += p0 + p1;
        sts32(to + ((c >> 1) * 8 + 2 * t + (c & 1)) * P_ROW, pack_f16(p0, p1));
      }
      warp_arrive(smem + BAR_P_FULL + buffer * 8, lane);
    }

    // Sums over the keys; then what the values are to be multiplied by.
    const u32 sums = smem + at_sums + (item_count & 1) * HEADS * 16;
#pragma unroll
    for (int c = 0; c < 2 * NB; c++) {
      l[c] = sum_of_head(l[c]);
      if (g == 0) stsf(sums + (((c >> 1) * 8 + 2 * t + (c & 1)) * 4 + warp) * 4, l[c]);
    }
    sync_threads<2, 128>();
    if (warp == 0) {
      if (item_count) bar_wait(smem + BAR_READ, item_count - 1 & 1);
      if (g == 0) {
#pragma unroll
        for (int c = 0; c < 2 * NB; c++) {
          const int head = (c >> 1) * 8 + 2 * t + (c & 1);
          const uint4 w = lds128(sums + head * 16);
          const float sum = __uint_as_float(w.x) + __uint_as_float(w.y) + __uint_as_float(w.z) + __uint_as_float(w.w);
          // A cluster's block normalises by its own keys, so that no sum of large values overflows; merge() adds the
          // sink.
          const float factor = sum == 0.f ? 0.f : inverse(CLUSTER ? sum : sum + exp2_(sink[c] - m[c]));
          const u32 v[4] = {__float_as_uint(factor), __float_as_uint(m[c]), __float_as_uint(sum), 0};
          sts128(smem + at_result + head * 16, v);
          if (!CLUSTER && head0 + head < p.num_heads)
            p.lse[(i64)token * p.num_heads + head0 + head] = log_sum(m[c], sum);
        }
      }
      warp_arrive(smem + BAR_DONE, lane);
    }
  }
}

// ---- queries: written by warps 4-11 ---------------------------------------------------------------------------------

constexpr int QUERY_HEADS = HEADS / WARPS_VALUES;  // of one warp

struct Query {
  uint4 v[QUERY_HEADS][2];  // lane i holds channels [16 i, 16 i + 16): 28 lanes of fp8 channels, 4 of RoPE

  DEV void load(const Params& p, int item, int warp, int lane) {
    const int token = token_of(p, item), head0 = (item - token * p.head_blocks) * HEADS;
#pragma unroll
    for (int j = 0; j < QUERY_HEADS; j++) {
      const int head = head0 + j * WARPS_VALUES + warp;
      const u16* row = p.q + token * p.q_token_stride + head * p.q_head_stride + lane * 16;
      v[j][0] = v[j][1] = make_uint4(0, 0, 0, 0);
      if (head < p.num_heads) {
        v[j][0] = ldg128(row);
        v[j][1] = ldg128(row + 8);
      }
    }
  }
  // As e4m3 hi + lo and, for RoPE, bf16; the scores wait for BAR_Q.
  DEV void store(const Params& p, u32 smem, int buffer, int warp, int lane) const {
    const u32 q = smem + at_q + buffer * Q_BYTES;
#pragma unroll
    for (int j = 0; j < QUERY_HEADS; j++) {
      const int row = j * WARPS_VALUES + warp;
      u32 x[8] = {v[j][0].x, v[j][0].y, v[j][0].z, v[j][0].w, v[j][1].x, v[j][1].y, v[j][1].z, v[j][1].w};
      u32 largest = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) largest = max_u16x2(largest, x[i] & 0x7fff7fffu);
      largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
      // A power of two that brings the head's largest channel into [128, 256): e4m3 then keeps 17 bits below it.
      const u32 exponent = min(261 - (largest >> 7), 227u);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = mul_bf16x2(x[i], exponent << 7 | exponent << 23);
      if (lane == 0)
        stsf(smem + at_q_unit + (buffer * HEADS + row) * 4, __uint_as_float((254 - exponent) << 23) * p.scale_log2);
      if (lane < 28) {
        u32 hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 y0 = pack_f16(bf16_lo(x[2 * i]), bf16_hi(x[2 * i])),
                    y1 = pack_f16(bf16_lo(x[2 * i + 1]), bf16_hi(x[2 * i + 1]));
          u32 h0, h1;
          hi[i] = f16_to_e4m3(y0, y1);
          e4m3_to_f16(hi[i], h0, h1);
          lo[i] = f16_to_e4m3(sub_f16x2(y0, h0), sub_f16x2(y1, h1));
        }
        const u32 group = q + (lane >> 2) * (Q_ROWS * 64) + (((lane & 3) ^ (row >> 1 & 3)) << 4);
        sts128(group + row * 64, hi);
        sts128(group + (HEADS + row) * 64, lo);
      } else {
        const u32 at = q + Q_ROPE_AT + row * 128, c = (lane - 28) * 2;
        sts128(at + ((c ^ (row & 7)) << 4), x);
        sts128(at + (((c + 1) ^ (row & 7)) << 4), x + 4);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warp_arrive(smem + BAR_Q + buffer * 8, lane);
  }
};

// ---- warps 4-11: values ---------------------------------------------------------------------------------------------

// O^T of one 64-channel group: o[i][nb] has channels 8 b + 2 i (elements 0, 1) and 8 b + 2 i + 1 (2, 3), where b is
// `block`, of heads 8 nb + 2 t (0, 2) and the next (1, 3).
template <bool ROPE>
DEV void values_block(float (*o)[NB][4], int ks, u32 keys0, u32 keys2, u32 probs, u32 scale0, u32 scale1) {
  u32 b[NB][2];
  if constexpr (NB == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
                 : "=r"(b[0][0]), "=r"(b[0][1])
                 : "r"(probs + ks * 32));
  } else {
#pragma unroll
    for (int nb = 0; nb < NB; nb += 2) ldmatrix4(probs + nb * 8 * P_ROW + ks * 32, &b[nb][0]);
  }
  u32 a[4][4];
  if constexpr (ROPE) {
    const uint4 v0 = lds128(keys0 + ks * 2048), v1 = lds128(keys0 + ks * 2048 + 1024);
    const uint4 v2 = lds128(keys2 + ks * 2048), v3 = lds128(keys2 + ks * 2048 + 1024);
    const u32 x0[4] = {v0.x, v0.y, v0.z, v0.w}, x1[4] = {v1.x, v1.y, v1.z, v1.w};
    const u32 x2[4] = {v2.x, v2.y, v2.z, v2.w}, x3[4] = {v3.x, v3.y, v3.z, v3.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i][0] = __byte_perm(x0[i], x1[i], 0x5410);
      a[i][1] = __byte_perm(x0[i], x1[i], 0x7632);
      a[i][2] = __byte_perm(x2[i], x3[i], 0x5410);
      a[i][3] = __byte_perm(x2[i], x3[i], 0x7632);
    }
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float lo, hi;
        unpack_f16(b[nb][j], lo, hi);
        b[nb][j] = pack_bf16(lo, hi);
      }
  } else {
    const uint2 v0 = lds64(keys0 + ks * 1024), v1 = lds64(keys0 + ks * 1024 + 512);
    const uint2 v2 = lds64(keys2 + ks * 1024), v3 = lds64(keys2 + ks * 1024 + 512);
    e4m3_to_f16(__byte_perm(v0.x, v1.x, 0x5140), a[0][0], a[0][1]);
    e4m3_to_f16(__byte_perm(v2.x, v3.x, 0x5140), a[0][2], a[0][3]);
    e4m3_to_f16(__byte_perm(v0.x, v1.x, 0x7362), a[1][0], a[1][1]);
    e4m3_to_f16(__byte_perm(v2.x, v3.x, 0x7362), a[1][2], a[1][3]);
    e4m3_to_f16(__byte_perm(v0.y, v1.y, 0x5140), a[2][0], a[2][1]);
    e4m3_to_f16(__byte_perm(v2.y, v3.y, 0x5140), a[2][2], a[2][3]);
    e4m3_to_f16(__byte_perm(v0.y, v1.y, 0x7362), a[3][0], a[3][1]);
    e4m3_to_f16(__byte_perm(v2.y, v3.y, 0x7362), a[3][2], a[3][3]);
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
      b[nb][0] = mul_f16x2(b[nb][0], scale0);
      b[nb][1] = mul_f16x2(b[nb][1], scale1);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int nb = 0; nb < NB; nb++) mma<ROPE>(o[i][nb], a[i], b[nb][0], b[nb][1]);
}

// x follows the largest scale exponent of a tile; it is kept while that lies in [x - BELOW, x + ABOVE], where fp16
// holds the scales relative to it. Returns the factor by which the accumulators change.
constexpr int ABOVE = 5, BELOW = 8;
DEV float follow_exponent(int& x, int largest) {
  if (largest == 0) return 1.f;  // no key
  const int old = x;
  x = max(largest, old - 90);
  return __uint_as_float((u32)(max(old - x, -127) + 127) << 23);
}
// The fp16 power of two 2**(exponent - x); 0 below 2**-14.
DEV u32 relative_scale(int exponent, int x) { return min(max(exponent - x + 15, 0), 30) << 10; }

DEV void values(const Params& p, u32 smem, int warp, int lane) {
  const bool rope = warp == GROUPS;
  const int g = lane >> 2, t = lane & 3;
  const u32 rank = cluster_rank(), size = cluster_size();
  const int step = over_cluster(p, gridDim.x);
  // Lane (g, t) reads 8 channels of keys row, row + 8, row + 2 and row + 10 of every 16: rows and channel blocks are
  // chosen so that no two lanes of a phase meet in a bank.
  const int row = (t & 1) | (t & 2) << 1, block = rope ? (g & 4) | (g & 1) << 1 | (g & 2) >> 1 : g;
  const u32 keys0 = rope ? ROPE_AT + row * 128 + ((block ^ (row & 7)) << 4)
                         : warp * GROUP_BYTES + row * 64 + (((block >> 1) ^ (row >> 1)) << 4) + (block & 1) * 8;
  const u32 keys2 =
      rope ? ROPE_AT + (row + 2) * 128 + ((block ^ (row + 2 & 7)) << 4)
           : warp * GROUP_BYTES + (row + 2) * 64 + (((block >> 1) ^ (row + 2 >> 1)) << 4) + (block & 1) * 8;
  const u32 probs = smem + at_p + ((NB > 1 ? lane >> 4 : 0) * 8 + (lane & 7)) * P_ROW + (lane >> 3 & 1) * 16;
  // The scales of a tile: lane 8 ks + j has those of the key pair in word j of the 16 keys ks.
  const u32 scales =
      smem + at_scales + ((lane >> 3) * 16 + ((lane & 1) | (lane & 2) << 1 | (lane & 4) >> 1)) * 8 + warp;
  Stage stage;
  int tile_count = 0, item_count = -1;
  RawLengths raw;
  for (int item = (int)over_cluster(p, blockIdx.x) - step; item < p.num_items; item += step, item_count++) {
    Query query;
    const bool more = item + step < p.num_items;
    const RawLengths now = raw;
    raw.load(p, item + step);
    if (more) {
      query.load(p, item + step, warp, lane);
      query.store(p, smem, (item_count + 1) % Q_BUFFERS, warp, lane);
    }
    if (item_count < 0) continue;
    const Share share(p, Lengths(p, now), rank);
    int x = rope ? 127 : 0;
    float o[4][NB][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++) o[i][nb][0] = o[i][nb][1] = o[i][nb][2] = o[i][nb][3] = 0.f;

    for (int tile = 0; tile < share.tiles; tile++, tile_count++, stage.next()) {
      const int buffer = tile_count & 1, blocks = share.blocks(tile);
      bar_wait(smem + BAR_P_FULL + buffer * 8, tile_count >> 1 & 1);
      bar_wait(smem + BAR_FULL + stage.index * 8, stage.phase);
      const u32 flag = lds32(smem + at_flag + buffer * 4);
      float shift = 1.f;
      u32 scale = 0;
      if (!rope) {
        int e0 = lds8(scales + stage.index * TILE * 8), e1 = lds8(scales + stage.index * TILE * 8 + 64);
        if (lane >> 3 >= blocks) e0 = e1 = 0;
        const int larger = max(e0, e1);
        if (__any_sync(~0u, larger > x + ABOVE) || !__any_sync(~0u, larger >= x - BELOW))
          shift = follow_exponent(x, __reduce_max_sync(~0u, larger));
        scale = relative_scale(e0, x) | relative_scale(e1, x) << 16;
      }
      if (flag || shift != 1.f) {
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
          const uint2 w = lds64(smem + at_alpha + (buffer * HEADS + nb * 8 + 2 * t) * 4);
          const float a0 = flag ? __uint_as_float(w.x) * shift : shift,
                      a1 = flag ? __uint_as_float(w.y) * shift : shift;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            o[i][nb][0] *= a0;
            o[i][nb][1] *= a1;
            o[i][nb][2] *= a0;
            o[i][nb][3] *= a1;
          }
        }
      }
      const u32 data = smem + stage.index * STAGE_BYTES, pb = probs + buffer * HEADS * P_ROW;
      auto fp8_block = [&](int ks) {
        const u32 scale0 = __shfl_sync(~0u, scale, ks * 8 + t), scale1 = __shfl_sync(~0u, scale, ks * 8 + 4 + t);
        values_block<false>(o, ks, data + keys0, data + keys2, pb, scale0, scale1);
      };
      auto rope_block = [&](int ks) { values_block<true>(o, ks, data + keys0, data + keys2, pb, 0, 0); };
      if (!rope && blocks == 4) {
#pragma unroll
        for (int ks = 0; ks < 4; ks++) fp8_block(ks);
      } else if (!rope) {
#pragma unroll 1
        for (int ks = 0; ks < blocks; ks++) fp8_block(ks);
      } else {
#pragma unroll 1
        for (int ks = 0; ks < blocks; ks++) rope_block(ks);
      }
      warp_arrive(smem + BAR_EMPTY + stage.index * 8, lane);
      warp_arrive(smem + BAR_P_EMPTY + buffer * 8, lane);
    }

    bar_wait(smem + BAR_DONE, item_count & 1);
    // Every block of the cluster has set up BAR_MERGE.
    if (CLUSTER) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    // 2**(x - 127): below the normal floats for scale byte 0.
    const float unit = __uint_as_float(x ? (u32)x << 23 : 1u << 22);
    const int token = token_of(p, item), head0 = (item - token * p.head_blocks) * HEADS,
              channel = warp * 64 + block * 8;
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int local = nb * 8 + 2 * t + j, head = head0 + local;
        const uint4 result = lds128(smem + at_result + local * 16);
        const float f = __uint_as_float(result.x) * unit;
        if (!CLUSTER) {
          u32 v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = pack_bf16(o[i][nb][j] * f, o[i][nb][2 + j] * f);
          u16* to = p.o + token * p.o_token_stride + head * p.o_head_stride + channel;
          if (head < p.num_heads) *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
        } else {
          const u32 owner = local * size / HEADS, index = local - first_owned(p, owner, size);
          const u32 own = smem + at_shares + (rank * over_cluster(p, HEADS + size - 1) + index) * SHARE_BYTES;
          if (owner == rank) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
              const u32 v[4] = {__float_as_uint(o[i][nb][j] * f), __float_as_uint(o[i][nb][2 + j] * f),
                                __float_as_uint(o[i + 1][nb][j] * f), __float_as_uint(o[i + 1][nb][2 + j] * f)};
              sts128(own + channel * 4 + i * 8, v);
            }
            if (warp == 0 && g == 0) sts64f(own + 2048, __uint_as_float(result.y), __uint_as_float(result.z));
          } else {
            const u32 to = remote(own, owner), bar = remote(smem + BAR_MERGE, owner);
#pragma unroll
            for (int i = 0; i < 4; i += 2)
              send128(to + channel * 4 + i * 8, bar, o[i][nb][j] * f, o[i][nb][2 + j] * f, o[i + 1][nb][j] * f,
                      o[i + 1][nb][2 + j] * f);
            if (warp == 0 && g == 0) send64(to + 2048, bar, __uint_as_float(result.y), __uint_as_float(result.z));
          }
        }
      }
    warp_arrive(smem + (CLUSTER ? BAR_MERGE : BAR_READ), lane);
  }
}

// Merge the owned heads once every block's share of them has arrived, and add the sink.
DEV void merge(const Params& p, u32 smem, int thread, float sink0, float sink1) {
  const u32 rank = cluster_rank(), size = cluster_size(), rows = over_cluster(p, HEADS + size - 1);
  const int lane = thread & 31, warp = thread >> 5;
  const int item = over_cluster(p, blockIdx.x), token = token_of(p, item),
            head0 = (item - token * p.head_blocks) * HEADS;
  const int first = first_owned(p, rank, size),
            count = min(first_owned(p, rank + 1, size), p.num_heads - head0) - first;
  auto share_of = [&](u32 source, int i) {  // of the i-th owned head
    return smem + at_shares + (source * rows + i) * SHARE_BYTES;
  };
  if (first == first_owned(p, rank + 1, size)) return;
  bar_wait(smem + BAR_MERGE, 0);
  // Lane c gets what the share of block c weighs in head i.
  auto weigh = [&](int i, float sink, bool write_lse) {
    float reference = UNSET, sum = 0.f;
    if (lane < size) {
      const uint2 w = lds64(share_of(lane, i) + 2048);
      sum = __uint_as_float(w.y);
      if (sum != 0.f) reference = __uint_as_float(w.x);
    }
    float m = reference;
#pragma unroll
    for (int d = 1; d < 16; d <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    const float weight = sum * exp2_(reference - m);
    float total = weight;
#pragma unroll
    for (int d = 1; d < 16; d <<= 1) total += __shfl_xor_sync(~0u, total, d);
    if (write_lse && lane == 0) p.lse[(i64)token * p.num_heads + head0 + first + i] = log_sum(m, total);
    return total == 0.f ? 0.f : weight * inverse(total + exp2_(LOG2E * sink - m));
  };
  auto store = [&](int i, float x, float y) {
    *(u32*)(p.o + token * p.o_token_stride + (head0 + first + i) * p.o_head_stride + thread * 2) = pack_bf16(x, y);
  };
  // Every warp weighs for itself and waits for no other: 0.25 us less at batch 1, and only with a loop of its own.
  if (count == 1) {
    const float weight = weigh(0, sink0, warp == 0);
    float x = 0.f, y = 0.f;
#pragma unroll 8
    for (int c = 0; c < size; c++) {
      const uint2 v = lds64(share_of(c, 0) + thread * 8);
      const float w = __shfl_sync(~0u, weight, c);
      x = fmaf(w, __uint_as_float(v.x), x);
      y = fmaf(w, __uint_as_float(v.y), y);
    }
    store(0, x, y);
    return;
  }
  const u32 weights = smem + at_tile_max;
  for (int i = warp; i < count; i += WARPS_VALUES) {
    const float weight = weigh(i, i == warp ? sink0 : sink1, true);
    if (lane < size) stsf(weights + (i * size + lane) * 4, weight);
  }
  sync_threads<5, 256>();
#pragma unroll 2
  for (int i = 0; i < count; i++) {
    float x = 0.f, y = 0.f;
#pragma unroll 4
    for (int c = 0; c < size; c++) {
      const uint2 v = lds64(share_of(c, i) + thread * 8);
      const float w = ldsf(weights + (i * size + c) * 4);
      x = fmaf(w, __uint_as_float(v.x), x);
      y = fmaf(w, __uint_as_float(v.y), y);
    }
    store(i, x, y);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

constexpr int SCORE_REGS = HEADS == 32 ? 200 : 208, VALUE_REGS = HEADS == 32 ? 136 : 128;

extern "C" __global__ void __launch_bounds__(512, 1) sparse_mqa(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 smem = smem_address(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      bar_init(smem + BAR_FULL + i * 8, WARPS_GATHER * (32 + WARP_ARRIVALS));
      bar_init(smem + BAR_EMPTY + i * 8, WARPS_VALUES * WARP_ARRIVALS);
    }
    for (int i = 0; i < 2; i++) {
      bar_init(smem + BAR_P_FULL + i * 8, WARPS_SCORES * WARP_ARRIVALS);
      bar_init(smem + BAR_P_EMPTY + i * 8, WARPS_VALUES * WARP_ARRIVALS);
    }
    bar_init(smem + BAR_DONE, WARP_ARRIVALS);
    bar_init(smem + BAR_READ, WARPS_VALUES * WARP_ARRIVALS);
    bar_init(smem + BAR_MERGE, 1 + WARPS_VALUES * WARP_ARRIVALS);  // others' shares as bytes, and the own ones
    for (int i = 0; i < Q_BUFFERS; i++) bar_init(smem + BAR_Q + i * 8, WARPS_VALUES * WARP_ARRIVALS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (CLUSTER) {
      const u32 rank = cluster_rank(), size = cluster_size(),
                count = first_owned(p, rank + 1, size) - first_owned(p, rank, size);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(smem + BAR_MERGE),
                   "r"((size - 1) * count * SHARE_SENT)
                   : "memory");
    }
  }
  __syncthreads();
  // A cluster's blocks send to one another once all have come here.
  if (CLUSTER) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // The kernel before this one may still run and write what is read here: until it has ended, prefetches only. Warps
  // 0-3 have nothing else to do before the first tile arrives, so that looking up keys delays nobody.
  {
    const int item = over_cluster(p, blockIdx.x), token = token_of(p, item),
              head0 = (item - token * p.head_blocks) * HEADS;
    const int i = threadIdx.x & 127, head = i >> 3;
    if (warp < FIRST_VALUES) {
      prefetch_keys(p, item, warp, lane);
    } else if (warp < FIRST_VALUES + 4) {
      if (i < 2) prefetch(p.region[i & p.region[1].num_keys > 0].lengths + token);
      prefetch_indices(p, token, i);
    } else if (warp < FIRST_GATHER) {
      for (int h = head; h < HEADS && head0 + h < p.num_heads; h += 16)
        prefetch(p.q + token * p.q_token_stride + (head0 + h) * p.q_head_stride + (i & 7) * 64);
      if (i == 0) prefetch(p.sink + head0);
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (p.overlap) asm volatile("griddepcontrol.launch_dependents;");
  if (warp >= FIRST_GATHER) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    gather(p, smem, warp - FIRST_GATHER, lane);
  } else if (warp < FIRST_VALUES) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SCORE_REGS));
    scores(p, smem, warp, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(VALUE_REGS));
    float sink0 = 0.f, sink1 = 0.f;  // of the heads that this warp will weigh in merge()
    if (CLUSTER) {
      const u32 size = cluster_size(), rank = cluster_rank();
      const int item = over_cluster(p, blockIdx.x), head0 = (item - token_of(p, item) * p.head_blocks) * HEADS;
      const int first = first_owned(p, rank, size), owned = first_owned(p, rank + 1, size) - first;
      const int head = head0 + first + (owned > 1 ? warp - FIRST_VALUES : 0);
      sink0 = ldgf(p.sink + min(head, p.num_heads - 1));
      sink1 = ldgf(p.sink + min(head + WARPS_VALUES, p.num_heads - 1));
    }
    values(p, smem, warp - FIRST_VALUES, lane);
    if (CLUSTER) merge(p, smem, threadIdx.x - FIRST_VALUES * 32, sink0, sink1);
  }
}
