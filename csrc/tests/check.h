// What the tests share: a check that ends the program, small random integers, and ways to run in parallel.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "cpu/layout.h"

#define CHECK(condition, ...)                                            \
  do {                                                                   \
    if (condition) break;                                                \
    std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
    std::fprintf(stderr, __VA_ARGS__);                                   \
    std::fprintf(stderr, "\n");                                          \
    std::exit(1);                                                        \
  } while (false)

inline std::mt19937 generator(0);

// Integers, so that sums of products are exact in every floating-point type and order.
template <typename T>
std::vector<T> random_integers(int64_t count) {
  std::vector<T> values(count);
  for (T& x : values) x = static_cast<T>(std::uniform_int_distribution<int>(-4, 4)(generator));
  return values;
}

inline magep::Parallel serial(int64_t threads) {
  return {threads, [](int64_t count, const std::function<void(int64_t)>& body) {
            for (int64_t t = 0; t < count; ++t) body(t);
          }};
}

inline magep::Parallel threaded(int64_t threads) {
  return {threads, [](int64_t count, const std::function<void(int64_t)>& body) {
            std::vector<std::thread> running;
            for (int64_t t = 0; t < count; ++t) running.emplace_back(body, t);
            for (std::thread& thread : running) thread.join();
          }};
}
