#include "check.h"
#include "cpu/gemm.h"
#include "cpu/lanes.h"
#include "cpu/storage.h"

namespace {

using namespace magep::MAGEP_ISA;

constexpr double kUntouched = 12345;

// Checks C against the plain product; memory between its rows must keep kUntouched.
template <typename T>
void check_gemm(int64_t M, int64_t N, int64_t K, int64_t row_stride, int64_t column_stride, int64_t padding,
                bool accumulate) {
  const int64_t ldb = N + padding, ldc = N + 2 * padding;
  const auto a = random_integers<T>(K ? (M - 1) * row_stride + (K - 1) * column_stride + 1 : 0);
  const auto b = random_integers<T>(K ? (K - 1) * ldb + N : 0);
  std::vector<T> c((M - 1) * ldc + N, T(kUntouched));
  std::vector<T> expected = c;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      T& sum = expected[m * ldc + n];
      if (accumulate)
        c[m * ldc + n] = sum = static_cast<T>(m - n);
      else
        sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += a[m * row_stride + k * column_stride] * b[k * ldb + n];
    }
  gemm<T>(M, N, K, {a.data(), row_stride, column_stride}, b.data(), ldb, c.data(), ldc, accumulate);
  CHECK(c == expected, "M=%d N=%d K=%d strides=%d,%d padding=%d accumulate=%d", int(M), int(N), int(K), int(row_stride),
        int(column_stride), int(padding), accumulate);
}

template <typename T>
void test_gemm() {
  for (int64_t M = 1; M <= 40; ++M)
    for (int64_t N = 1; N <= 40; ++N)
      for (int64_t K : {0, 1, 2, 3, 8, 21, 40}) {
        const int64_t padding = (M + N + K) % 3;
        const bool accumulate = (M + N) % 2;
        check_gemm<T>(M, N, K, K + padding, 1, padding, accumulate);
        check_gemm<T>(M, N, K, 1, M + padding, padding, !accumulate);
      }
  for (int64_t M : {1, 5, 13})
    for (int64_t N : {1, 33, 600})
      for (int64_t K : {127, 128, 129, 300})
        for (bool accumulate : {false, true}) {
          check_gemm<T>(M, N, K, K, 1, 0, accumulate);
          check_gemm<T>(M, N, K, 3 * K, 3, 1, accumulate);
        }
}

// gemm_dot, and gemm_transposed, which takes it or transposes B.
template <typename T>
void check_gemm_dot(int64_t M, int64_t N, int64_t K, int64_t padding, bool accumulate) {
  const int64_t ld = K + padding, ldc = N + padding;
  const auto a = random_integers<T>((M - 1) * ld + K), b = random_integers<T>((N - 1) * ld + K);
  std::vector<T> c((M - 1) * ldc + N, T(kUntouched)), expected = c;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      T& sum = expected[m * ldc + n];
      c[m * ldc + n] = sum = static_cast<T>(m - n);
      if (!accumulate) sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += a[m * ld + k] * b[n * ld + k];
    }
  auto again = c;
  std::vector<T> space(kTransposedBlock);
  gemm_dot<T>(M, N, K, a.data(), ld, b.data(), ld, c.data(), ldc, accumulate);
  gemm_transposed<T>(M, N, K, a.data(), ld, b.data(), ld, again.data(), ldc, accumulate, space.data(), ld);
  CHECK(c == expected && again == expected, "M=%d N=%d K=%d padding=%d accumulate=%d", int(M), int(N), int(K),
        int(padding), accumulate);
}

template <typename T>
void test_gemm_dot() {
  for (int64_t M = 1; M <= 18; ++M)
    for (int64_t N = 1; N <= 18; ++N)
      for (int64_t K : {1, 2, 3, 7, 8, 15, 16, 17, 40, 64})
        for (bool accumulate : {false, true}) check_gemm_dot<T>(M, N, K, (M + N + K) % 3, accumulate);
  for (int64_t N : {64, 300})
    for (int64_t K : {5, 64, 256, 300}) check_gemm_dot<T>(24, N, K, 1, true);
}

template <typename T>
void test_transpose() {
  for (int64_t rows = 1; rows <= 40; ++rows)
    for (int64_t columns = 1; columns <= 40; ++columns) {
      const int64_t ld_from = columns + rows % 3, ld_to = rows + columns % 3;
      const auto from = random_integers<T>((rows - 1) * ld_from + columns);
      std::vector<T> to((columns - 1) * ld_to + rows, T(kUntouched)), expected = to;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) expected[c * ld_to + r] = from[r * ld_from + c];
      transpose<T>(rows, columns, from.data(), ld_from, to.data(), ld_to);
      CHECK(to == expected, "rows=%d columns=%d", int(rows), int(columns));
    }
}

template <typename T>
void test_lanes() {
  for (int64_t n = 0; n <= 70; ++n) {
    const auto x = random_integers<T>(n), y = random_integers<T>(n), start = random_integers<T>(n);
    const auto check = [&](const char* name, auto&& run, auto&& expected) {
      auto out = start;
      run(out.data());
      for (int64_t k = 0; k < n; ++k) CHECK(out[k] == expected(k), "%s, n=%d, lane %d", name, int(n), int(k));
    };
    check(
        "add_product", [&](T* out) { add_product(n, x.data(), y.data(), out); },
        [&](int64_t k) { return start[k] + x[k] * y[k]; });
    check("add", [&](T* out) { add(n, x.data(), out); }, [&](int64_t k) { return start[k] + x[k]; });
    check("scale", [&](T* out) { scale(n, T(3), x.data(), out); }, [&](int64_t k) { return 3 * x[k]; });
  }
}

// a is used as it lies or transposed, which is how the kernels use it.
template <typename T>
void check_lane_gemm(int64_t d, int64_t M, int64_t N, int64_t K, bool transposed, bool accumulate) {
  const auto a = random_integers<T>(M * K * d), b = random_integers<T>(K * N * d);
  auto out = random_integers<T>(M * N * d), expected = out;
  const int64_t a_m = transposed ? 1 : K, a_k = transposed ? M : 1;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t lane = 0; lane < d; ++lane) {
        T& sum = expected[(m * N + n) * d + lane];
        if (!accumulate) sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += a[(m * a_m + k * a_k) * d + lane] * b[(k * N + n) * d + lane];
      }
  lane_gemm<T>(d, M, N, K, {a.data(), a_m, a_k}, {b.data(), N, 1}, {out.data(), N, 1}, accumulate);
  CHECK(out == expected, "d=%d M=%d N=%d K=%d transposed=%d accumulate=%d", int(d), int(M), int(N), int(K), transposed,
        accumulate);
}

// Three networks, which share a.
template <typename T>
void check_lane_gemm_each(int64_t d, int64_t M, int64_t N, int64_t K) {
  const int64_t networks = 3, b_stride = K * N * d + 1, out_stride = M * N * d + 2;
  const auto a = random_integers<T>(M * K * d), b = random_integers<T>(networks * b_stride);
  auto out = random_integers<T>(networks * out_stride), expected = out;
  for (int64_t net = 0; net < networks; ++net)
    lane_gemm<T>(d, M, N, K, {a.data(), K, 1}, {b.data() + net * b_stride, N, 1},
                 {expected.data() + net * out_stride, N, 1}, true);
  lane_gemm_each<T>(networks, b_stride, out_stride, d, M, N, K, {a.data(), K, 1}, {b.data(), N, 1}, {out.data(), N, 1},
                    true);
  CHECK(out == expected, "d=%d M=%d N=%d K=%d", int(d), int(M), int(N), int(K));
}

template <typename T>
void test_stream() {
  for (int64_t offset : {0, 1})
    for (int64_t count : {1, 15, 16, 64, 67}) {
      const auto from = random_integers<T>(count);
      std::vector<T> memory(count + 40, T(kUntouched));
      T* to = memory.data() + offset;
      while (offset == 0 && reinterpret_cast<uintptr_t>(to) % kVectorBytes != 0) ++to;
      stream_row(from.data(), count, to);
      finish_streams();
      CHECK(std::equal(from.begin(), from.end(), to) && to[count] == T(kUntouched), "offset=%d count=%d", int(offset),
            int(count));
    }
}

template <typename T>
void test_lane_gemm() {
  for (int64_t d : {1, 3, 4, 7, 8, 9, 15, 16, 17, 33})
    for (int64_t M = 1; M <= 9; ++M)
      for (int64_t N = 1; N <= 5; ++N) {
        check_lane_gemm_each<T>(d, M, N, 3);
        for (int64_t K : {0, 1, 2, 6})
          for (bool transposed : {false, true}) {
            check_lane_gemm<T>(d, M, N, K, transposed, false);
            check_lane_gemm<T>(d, M, N, K, transposed, true);
          }
      }
}

template <typename T>
void test_all() {
  test_gemm<T>();
  test_gemm_dot<T>();
  test_transpose<T>();
  test_lanes<T>();
  test_lane_gemm<T>();
  test_stream<T>();
}

}  // namespace

void run_tests() {
  test_all<float>();
  test_all<double>();
}
