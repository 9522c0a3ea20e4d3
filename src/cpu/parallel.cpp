/// Workers sleep on a condition variable between loops after a short wait for the next one, so that they do
/// not take processors from other libraries' threads. A worker joins a loop that is open and takes tasks
/// until none is left; the caller closes the loop when the tasks are gone and waits only for workers inside
/// it, so a worker that the kernel schedules late delays nobody.
#include "cpu/parallel.hpp"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moestro::cpu {
namespace {

constexpr int kSpins = 2000;  // some ten microseconds: the gap between two stages, not between two layers

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  void run(int workers, std::int64_t num_tasks, void (*function)(void*, std::int64_t, int), void* argument) {
    const std::lock_guard<std::mutex> one_loop_at_a_time(call_mutex_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (num_threads_ + 1 < workers && start_thread()) {
      }
      function_ = function;
      argument_ = argument;
      num_tasks_ = num_tasks;
      next_task_.store(0, std::memory_order_relaxed);
      max_joined_ = workers - 1;
      joined_ = 0;
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
      if (sleeping_ > 0) wake_.notify_all();
    }
    take_tasks(0);
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    done_.wait(lock, [&] { return inside_ == 0; });
  }

 private:
  bool start_thread() {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return false;  // fewer workers than asked for: slower, the same result
    }
    ++num_threads_;
    return true;
  }

  void take_tasks(int worker) {
    for (;;) {
      const std::int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) return;
      function_(argument_, task, worker);
    }
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      --sleeping_;
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_ || joined_ == max_joined_) continue;
      const int worker = ++joined_;
      ++inside_;
      lock.unlock();
      take_tasks(worker);
      lock.lock();
      if (--inside_ == 0 && !open_) done_.notify_one();
    }
  }

  std::mutex call_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> generation_{0};
  int num_threads_ = 0;
  int sleeping_ = 0;
  // The open loop; written under mutex_ while no worker is inside.
  void (*function_)(void*, std::int64_t, int) = nullptr;
  void* argument_ = nullptr;
  std::int64_t num_tasks_ = 0;
  std::atomic<std::int64_t> next_task_{0};
  int max_joined_ = 0;
  int joined_ = 0;
  int inside_ = 0;
  bool open_ = false;
};

std::atomic<Pool*> g_pool{nullptr};

/// Never destroyed: the detached workers outlive static destruction. A forked child has no workers, so it
/// drops the parent's pool and makes its own.
Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr, std::memory_order_relaxed); });
  });
  Pool* current = g_pool.load(std::memory_order_acquire);
  if (current == nullptr) {
    auto* fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

int num_workers(const Context& ctx) {
  if (ctx.num_threads > 0) return ctx.num_threads;
  static const int processors = [] {
    const unsigned count = std::thread::hardware_concurrency();
    return count == 0 ? 1 : static_cast<int>(count);
  }();
  return processors;
}

void run_tasks(int workers, std::int64_t num_tasks, void (*function)(void*, std::int64_t, int),
               void* argument) {
  if (num_tasks < workers) workers = static_cast<int>(num_tasks);
  if (workers <= 1) {
    for (std::int64_t task = 0; task < num_tasks; ++task) function(argument, task, 0);
    return;
  }
  pool().run(workers, num_tasks, function, argument);
}

}  // namespace moestro::cpu
