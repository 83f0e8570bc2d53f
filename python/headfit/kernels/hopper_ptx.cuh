// PTX instructions of Hopper (sm_90a) as functions. A kernel's source is compiled behind this one: NVRTC has no include
// path, and what is not in the source is not in the key of the kernel cache.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__

DEV u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 lds32(u32 a) {
  u32 r;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(r) : "r"(a));
  return r;
}
DEV u32 lds8(u32 a) {
  u32 r;
  asm volatile("ld.shared.u8 %0,[%1];" : "=r"(r) : "r"(a));
  return r;
}
DEV u32 lds16(u32 a) {
  u16 r;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(r) : "r"(a));
  return r;
}
DEV uint2 lds64(u32 a) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(a));
  return r;
}
DEV uint4 lds128(u32 a) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a));
  return r;
}
DEV float ldsf(u32 a) { return __uint_as_float(lds32(a)); }
DEV void sts16(u32 a, u32 v) { asm volatile("st.shared.u16 [%0],%1;" ::"r"(a), "h"((u16)v) : "memory"); }
DEV void sts32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory"); }
DEV void stsf(u32 a, float v) { sts32(a, __float_as_uint(v)); }
DEV void sts64f(u32 a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0],{%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
DEV void sts128(u32 a, const u32* v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEV uint4 ldg128(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEV float ldgf(const float* p) {
  float r;
  asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(r) : "l"(p));
  return r;
}
DEV int ldg32(const int* p) {
  int r;
  asm volatile("ld.global.nc.s32 %0,[%1];" : "=r"(r) : "l"(p));
  return r;
}
DEV int ldg32_l2(const int* p) {  // past L1
  int r;
  asm volatile("ld.global.cg.s32 %0,[%1];" : "=r"(r) : "l"(p));
  return r;
}
DEV void ldmatrix4(u32 a, u32* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}
DEV void copy16(u32 to, const u8* from, u32 bytes) {  // fewer than 16 bytes: the rest is zeros
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEV void copy8(u32 to, const u8* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],8,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEV void bar_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(b), "r"(n) : "memory"); }
DEV void bar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(b) : "memory"); }
// One arrival for a warp. A race checker that does not follow __syncwarp() is given every lane's (RACECHECK).
#ifdef RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
DEV void warp_arrive(u32 b, int lane) {
  __syncwarp();
  if (WARP_ARRIVALS > 1 || lane == 0) bar_arrive(b);
}
DEV void bar_arrive_copies(u32 b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
}
DEV void bar_wait(u32 b, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(b), "r"(parity)
                 : "memory");
  } while (!done);
}
// A shared memory address of this block, as that of the same place in another block of its cluster.
DEV u32 remote(u32 address, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// Stores into another block's shared memory, by remote() addresses: of the data, and of the barrier that counts bytes.
DEV void send128(u32 address, u32 bar, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%2,%3,%4,%5},[%1];" ::"r"(address),
               "r"(bar), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
DEV void send64(u32 address, u32 bar, float x, float y) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0],{%2,%3},[%1];" ::"r"(address),
               "r"(bar), "f"(x), "f"(y)
               : "memory");
}
template <int ID, int THREADS>
DEV void sync_threads() {
  asm volatile("bar.sync %0,%1;" ::"n"(ID), "n"(THREADS) : "memory");
}
// Barrier that also says whether any thread's `mine` holds.
template <int ID, int THREADS>
DEV bool sync_any(bool mine) {
  u32 any;
  asm volatile("{.reg .pred p,q; setp.ne.u32 q,%1,0; bar.red.or.pred p,%2,%3,q; selp.u32 %0,1,0,p;}"
               : "=r"(any)
               : "r"((u32)mine), "n"(ID), "n"(THREADS)
               : "memory");
  return any;
}
DEV float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEV u32 max_u16x2(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEV u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEV void unpack_f16(u32 v, float& lo, float& hi) {
  asm("{.reg .b16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}" : "=f"(lo), "=f"(hi) : "r"(v));
}
DEV float bf16_lo(u32 v) { return __uint_as_float(v << 16); }
DEV float bf16_hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEV u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV u32 sub_f16x2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV void e4m3_to_f16(u32 v, u32& lo, u32& hi) {  // bytes 0, 1 -> lo, bytes 2, 3 -> hi
  asm("{.reg .b16 a,b; mov.b32 {a,b},%2; cvt.rn.f16x2.e4m3x2 %0,a; cvt.rn.f16x2.e4m3x2 %1,b;}"
      : "=r"(lo), "=r"(hi)
      : "r"(v));
}
DEV u32 f16_to_e4m3(u32 lo, u32 hi) {
  u32 r;
  asm("{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f16x2 a,%1; cvt.rn.satfinite.e4m3x2.f16x2 b,%2; mov.b32 %0,{a,b};}"
      : "=r"(r)
      : "r"(lo), "r"(hi));
  return r;
}
DEV void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEV void prefetch_bulk(const void* p, u32 bytes) {  // both multiples of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(p), "r"(bytes) : "memory");
}
template <bool BF16>
DEV void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if constexpr (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Descriptor of a K-major operand: 8-row atoms of 64- or 128-byte rows, swizzled; atoms follow one another. `base` is
// descriptor_base() of an address, `offset` bytes are added to it.
DEV u32 descriptor_base(u32 address) { return __shfl_sync(~0u, address >> 4 | 1 << 16, 0); }
template <int ROW_BYTES>
DEV u64 descriptor(u32 base, int offset) {
  constexpr u32 high = ROW_BYTES * 8 >> 4 | (ROW_BYTES == 128 ? 1u : 2u) << 30;
  return (u64)high << 32 | (base + (offset >> 4));
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC8(d, i) ACC4(d, i), ACC4(d, i + 4)
#define ACC16(d, i) ACC8(d, i), ACC8(d, i + 8)
#define L4 "%0,%1,%2,%3"
#define L8 L4 ",%4,%5,%6,%7"
#define L16 L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA(shape, types, list, a, b, p, tail, ...)                                                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p," p ",0; wgmma.mma_async.sync.aligned." shape "." types " {" list "}," a \
               "," b ",p,1,1" tail ";}"                                                                               \
               : __VA_ARGS__                                                                                          \
               : "l"(da), "l"(db), "r"(accumulate))

// D[64 x N] (+)= A . B^T, 32 e4m3 channels
template <int N>
DEV void wgmma_fp8(float* d, u64 da, u64 db, int accumulate) {
  if constexpr (N == 16) WGMMA("m64n16k32", "f32.e4m3.e4m3", L8, "%8", "%9", "%10", "", ACC8(d, 0));
  if constexpr (N == 32) WGMMA("m64n32k32", "f32.e4m3.e4m3", L16, "%16", "%17", "%18", "", ACC16(d, 0));
}
// the same, 16 bf16 channels
template <int N>
DEV void wgmma_bf16(float* d, u64 da, u64 db, int accumulate) {
  if constexpr (N == 8) WGMMA("m64n8k16", "f32.bf16.bf16", L4, "%4", "%5", "%6", ",0,0", ACC4(d, 0));
  if constexpr (N == 16) WGMMA("m64n16k16", "f32.bf16.bf16", L8, "%8", "%9", "%10", ",0,0", ACC8(d, 0));
  if constexpr (N == 32) WGMMA("m64n32k16", "f32.bf16.bf16", L16, "%16", "%17", "%18", ",0,0", ACC16(d, 0));
}
