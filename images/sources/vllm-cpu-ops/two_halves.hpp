// The AVX-512 operations of vLLM 0.4.2's cpu_types.hpp, each implemented on two AVX2 registers, so that its CPU
// operators run on every x86-64-v3 machine. Must be the first include: its macros replace the compiler's intrinsics,
// which functions compiled without AVX-512 cannot call.
#pragma once

#include <immintrin.h>

namespace two_halves {

struct Integers {
  __m256i low, high;
};

struct Floats {
  __m256 low, high;

  Floats() = default;
  Floats(__m256 first, __m256 second) : low(first), high(second) {}
  explicit Floats(const Integers &bits)
      : low(_mm256_castsi256_ps(bits.low)), high(_mm256_castsi256_ps(bits.high)) {}
};

inline Integers bits_of(const Floats &floats) {
  return {_mm256_castps_si256(floats.low), _mm256_castps_si256(floats.high)};
}

inline Floats fill(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

inline Floats load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

inline Integers load_bits(const void *from) {
  const auto *halves = static_cast<const __m256i *>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

inline void store(float *to, const Floats &floats) {
  _mm256_storeu_ps(to, floats.low);
  _mm256_storeu_ps(to + 8, floats.high);
}

inline Floats add(const Floats &a, const Floats &b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

inline Floats subtract(const Floats &a, const Floats &b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

inline Floats multiply(const Floats &a, const Floats &b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

inline Floats divide(const Floats &a, const Floats &b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

// The sum of the elements whose bit in `mask` is set.
inline float sum(const Floats &floats, unsigned mask = 0xFFFF) {
  float values[16];
  store(values, floats);
  float total = 0;
  for (int index = 0; index < 16; ++index) {
    total += (mask >> index & 1) ? values[index] : 0;
  }
  return total;
}

inline Integers widen(__m128i bits) { return {_mm256_castsi128_si256(bits), _mm256_setzero_si256()}; }

inline Integers widen(__m256i bits) { return {bits, _mm256_setzero_si256()}; }

// `bits` with quarter `index` replaced.
template <int index> Integers with_quarter(const Integers &bits, __m128i quarter) {
  static_assert(index < 4);
  if constexpr (index < 2) {
    return {_mm256_inserti128_si256(bits.low, quarter, index), bits.high};
  } else {
    return {bits.low, _mm256_inserti128_si256(bits.high, quarter, index - 2)};
  }
}

// `bits` with half `index` replaced.
template <int index> Integers with_half(const Integers &bits, __m256i half) {
  static_assert(index < 2);
  return index ? Integers{bits.low, half} : Integers{half, bits.high};
}

// Each 128 bits shifted by so many bytes.
template <int bytes> Integers shift_left(const Integers &bits) {
  return {_mm256_bslli_epi128(bits.low, bytes), _mm256_bslli_epi128(bits.high, bytes)};
}

template <int bytes> Integers shift_right(const Integers &bits) {
  return {_mm256_bsrli_epi128(bits.low, bytes), _mm256_bsrli_epi128(bits.high, bytes)};
}

// 16 unsigned 16-bit numbers as 32-bit ones.
inline Integers lengthen(__m256i shorts) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(shorts)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(shorts, 1))};
}

// The lower 16 bits of each of 8 numbers.
inline __m128i shorten(__m256i longs) {
  const __m256i lower = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8,
                                         9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(longs, lower), 0x08));
}

inline __m256i shorten(const Integers &longs) {
  return _mm256_set_m128i(shorten(longs.high), shorten(longs.low));
}

} // namespace two_halves

#define __m512 two_halves::Floats
#define __m512i two_halves::Integers
#define _cvtu32_mask16(mask) static_cast<__mmask16>(mask)
#define _mm256_cvtepi32_epi16(longs) two_halves::shorten(longs)
#define _mm512_add_ps(a, b) two_halves::add(a, b)
#define _mm512_bslli_epi128(bits, bytes) two_halves::shift_left<bytes>(bits)
#define _mm512_bsrli_epi128(bits, bytes) two_halves::shift_right<bytes>(bits)
#define _mm512_castps_si512(floats) two_halves::bits_of(floats)
#define _mm512_castsi128_si512(bits) two_halves::widen(bits)
#define _mm512_castsi256_si512(bits) two_halves::widen(bits)
#define _mm512_castsi512_ps(bits) two_halves::Floats(bits)
#define _mm512_cvtepi32_epi16(longs) two_halves::shorten(longs)
#define _mm512_cvtepu16_epi32(shorts) two_halves::lengthen(shorts)
#define _mm512_div_ps(a, b) two_halves::divide(a, b)
#define _mm512_inserti32x4(bits, quarter, index) two_halves::with_quarter<index>(bits, quarter)
#define _mm512_inserti32x8(bits, half, index) two_halves::with_half<index>(bits, half)
#define _mm512_loadu_ps(from) two_halves::load(from)
#define _mm512_loadu_si512(from) two_halves::load_bits(from)
#define _mm512_mask_reduce_add_ps(mask, floats) two_halves::sum(floats, mask)
#define _mm512_mul_ps(a, b) two_halves::multiply(a, b)
#define _mm512_reduce_add_ps(floats) two_halves::sum(floats)
#define _mm512_set1_ps(value) two_halves::fill(value)
#define _mm512_storeu_ps(to, floats) two_halves::store(to, floats)
#define _mm512_sub_ps(a, b) two_halves::subtract(a, b)
