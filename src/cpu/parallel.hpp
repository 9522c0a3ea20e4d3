/// The CPU backend's workers: a persistent pool and a parallel loop over tasks.
///
/// Tasks are handed out in order by a counter, so that uneven tasks balance; a task must not depend on which
/// worker runs it, and then the result does not depend on the number of workers either.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moestro/context.hpp"

namespace moestro::cpu {

/// Workers that a call on `ctx` uses: ctx.num_threads, or one per processor this process may run on.
int num_workers(const Context& ctx);

/// Runs function(argument, task, worker) for every task in [0, num_tasks) on at most `workers` threads, of
/// which the caller is worker 0. Returns when all are done. One loop runs at a time; a second caller waits.
void run_tasks(int workers, std::int64_t num_tasks, void (*function)(void*, std::int64_t, int),
               void* argument);

/// body(task, worker), worker in [0, workers).
template <class Body>
void parallel_for(int workers, std::int64_t num_tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      workers, num_tasks,
      [](void* argument, std::int64_t task, int worker) { (*static_cast<Plain*>(argument))(task, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

/// Splits [0, count) into pieces of at most `grain` and runs body(first, last, worker) on each.
template <class Body>
void parallel_ranges(int workers, std::int64_t count, std::int64_t grain, Body&& body) {
  parallel_for(workers, (count + grain - 1) / grain, [&](std::int64_t task, int worker) {
    const std::int64_t first = task * grain;
    body(first, first + grain < count ? first + grain : count, worker);
  });
}

}  // namespace moestro::cpu
