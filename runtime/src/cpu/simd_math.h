// exp, 2^x, tanh, sigmoid and erf of vectors, good to about 2 ulp (erf 3), over the V of the file
// that includes it.
//
// The coefficients are our own fits (Lawson-weighted Chebyshev, float64), rounded to float32.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace plansmith {
namespace cpu {
namespace {

template <int N>
inline V Polynomial(const float (&c)[N], V x) {
  V r = VSet1(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) r = VFma(r, x, VSet1(c[i]));
  return r;
}

// exp(x); 0 below -87.33 (no denormals), held at exp(88.37) above; NaN stays.
inline V VExp(V x) {
  constexpr float kC[] = {0.5f, 0.1666651964187622f, 0.04166620969772339f, 0.008368861861526966f,
                          0.001395040424540639f};
  const V low = VSet1(-87.33f);
  const V y = VMin(VSet1(88.37f), VMax(low, x));
  const V n = VRound(VMul(y, VSet1(1.44269504f)));
  V r = VFma(n, VSet1(-0.693359375f), y);  // ln 2 in two parts, the first exact times n
  r = VFma(n, VSet1(2.12194440e-4f), r);
  const V p = VAdd(VFma(VMul(r, r), Polynomial(kC, r), r), VSet1(1.0f));
  return VSelectLess(x, low, VSet1(0.0f), VMul(p, VPow2(n)));
}

// 2^x for x <= 127; 0 below -126 (no denormals); 2^0 is 1; NaN stays. Half the instructions of
// VExp: what a softmax in base 2 takes.
inline V VExp2(V x) {
  constexpr float kC[] = {0.6931470036506653f, 0.24022242426872253f, 0.05550733581185341f,
                          0.009671512991189957f, 0.001326472731307149f};
  const V low = VSet1(-126.0f);
#if defined(__AVX512F__)
  const V n = VRound(x), f = VSub(x, n);
  const V p = VFma(f, Polynomial(kC, f), VSet1(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n);
#else
  const V y = VMax(low, x), n = VRound(y), f = VSub(y, n);
  const V p = VFma(f, Polynomial(kC, f), VSet1(1.0f));
  return VSelectLess(x, low, VSet1(0.0f), VMul(p, VPow2(n)));
#endif
}

inline V VSigmoid(V x) {
  const V one = VSet1(1.0f);
  return VDiv(one, VAdd(one, VExp(VSub(VSet1(0.0f), x))));
}

inline V VTanh(V x) {
  constexpr float kC[] = {-0.3333328068256378f, 0.13331353664398193f, -0.053730934858322144f,
                          0.020606692880392075f, -0.005665316712111235f};
  const V a = VAbs(x), one = VSet1(1.0f);
  const V z = VMul(x, x);
  const V small = VFma(VMul(x, z), Polynomial(kC, z), x);  // |x| < 0.625
  const V e = VExp(VAdd(a, a));
  const V large = VSub(one, VDiv(VSet1(2.0f), VAdd(e, one)));
  return VSelectLess(a, VSet1(0.625f), small, VCopySign(large, x));
}

inline V VErf(V x) {
  constexpr float kSmall[] = {
      1.1283791065216064f,   -0.3761262595653534f,    0.11283600330352783f,  -0.026854444295167923f,
      0.005189535673707724f, -0.0008020842215046287f, 7.889120024628937e-05f};
  // -log(erfc) on 1..4
  constexpr float kLarge[] = {-0.0001880402269307524f,  1.1295784711837769f,
                              0.6332198977470398f,      0.10841857641935349f,
                              -0.025208257138729095f,   0.004204561933875084f,
                              -0.00044133636401966214f, 2.1686850232072175e-05f};
  const V a = VAbs(x), one = VSet1(1.0f);
  const V small = VMul(x, Polynomial(kSmall, VMul(x, x)));
  const V r = Polynomial(kLarge, VMin(VSet1(4.0f), a));
  const V large = VSub(one, VExp(VSub(VSet1(0.0f), r)));
  return VSelectLess(a, one, small, VCopySign(large, x));
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
