// Makes a process run one thread at a time, in an order that its own doing alone decides: preloaded
// into the process that compiles a plan, see fixed_layout.py.
//
// A thread runs until it waits for another one; then who asked first for a turn goes on. Of two
// threads one at most waits for a turn, so their order is always the same; where more are woken at
// once, the kernel says who asks first. Two things besides tell runs apart and are the same here:
// how many threads a C++ program asks for (one core, whatever the machine has), and the clock of
// C++, which steps by a microsecond a reading, for a message is longer or shorter by the times it
// tells. What C++ waits for until a time on that clock is over at once.
//
// What counts as waiting is what is defined below: condition variables, semaphores, joins, futexes
// by syscall(), sleeps, and locks that another thread holds. Where a thread waits by other means
// for one that has no turn, all stand still; after kStandstillSeconds without any work done the
// order is given up, and threads run as they like; plansmith_threads_take_turns() tells. A thread's
// turn ends with its function: destructors of its C++ thread_local objects run beside the next one.
//
// SPDX-License-Identifier: Apache-2.0

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { kStandstillSeconds = 20 };
static const double kStandstillCpuSeconds = 0.05;

// Turns are numbered in the order in which they are asked for; the first thread has turn 0 from its
// start.
static _Atomic unsigned turns_asked = 1;
static _Atomic unsigned turn_now = 0;
static _Atomic int second_thread_started = 0;
static _Atomic int given_up = 0;
static _Thread_local int has_turn __attribute__((tls_model("initial-exec"))) = 0;

static long (*real_syscall)(long, ...);

// The function of that name in the library behind this one; two threads may look for it at once.
#define REAL(name)                               \
  static _Atomic(void*) found_;                  \
  if (!found_) found_ = dlsym(RTLD_NEXT, #name); \
  __typeof__(name)* const real = (__typeof__(name)*)found_

// Condition variables have an older form in glibc for x86-64, which is what older dlsym()s give.
#define REAL_CONDITION(name)                                     \
  static _Atomic(void*) found_;                                  \
  if (!found_) found_ = dlvsym(RTLD_NEXT, #name, "GLIBC_2.3.2"); \
  if (!found_) found_ = dlsym(RTLD_NEXT, #name);                 \
  __typeof__(name)* const real = (__typeof__(name)*)found_

// What a call returns that waits, and its errno: another thread has the turn meanwhile.
#define WAITING(call)                                     \
  ({                                                      \
    const int gives_ = second_thread_started && has_turn; \
    if (gives_) end_turn();                               \
    const __typeof__(call) returned_ = (call);            \
    if (gives_) wait_for_turn(ask_for_turn());            \
    returned_;                                            \
  })

__attribute__((constructor)) static void first_thread(void) {
  if (real_syscall) return;
  *(void**)(&real_syscall) = dlsym(RTLD_NEXT, "syscall");
  has_turn = 1;
}

static unsigned ask_for_turn(void) { return atomic_fetch_add(&turns_asked, 1); }

static double cpu_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void wait_for_turn(unsigned turn) {
  const struct timespec standstill = {kStandstillSeconds, 0};
  const int saved_errno = errno;
  unsigned now;
  while ((now = atomic_load(&turn_now)) != turn && !given_up) {
    const double before = cpu_seconds();
    const long woken =
        real_syscall(SYS_futex, &turn_now, FUTEX_WAIT_PRIVATE, now, &standstill, NULL, 0);
    if (woken != 0 && errno == ETIMEDOUT && cpu_seconds() - before < kStandstillCpuSeconds &&
        !atomic_exchange(&given_up, 1)) {
      fprintf(stderr, "[plansmith] the threads wait for one another; their order is given up\n");
      atomic_fetch_add(&turn_now, 1);  // who has yet to begin waiting for it to change will not
      real_syscall(SYS_futex, &turn_now, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
  }
  errno = saved_errno;
  has_turn = 1;
}

static void end_turn(void) {
  has_turn = 0;
  atomic_fetch_add(&turn_now, 1);
  const int saved_errno = errno;
  real_syscall(SYS_futex, &turn_now, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
  errno = saved_errno;
}

// 1 while nothing ran out of turn, else 0.
int plansmith_threads_take_turns(void) { return !given_up; }

struct start {
  void* (*function)(void*);
  void* argument;
  unsigned turn;
  _Atomic unsigned turn_is_set;
};

static void at_thread_end(void* unused) {
  (void)unused;
  if (has_turn) end_turn();
}

static void* run_thread(void* pointer) {
  struct start* const start = pointer;
  while (!start->turn_is_set) {
    real_syscall(SYS_futex, &start->turn_is_set, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
  }
  wait_for_turn(start->turn);
  void* (*const function)(void*) = start->function;
  void* const argument = start->argument;
  free(start);
  void* result;
  pthread_cleanup_push(at_thread_end, NULL);
  result = function(argument);
  pthread_cleanup_pop(1);
  return result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) {
  REAL(pthread_create);
  first_thread();  // another library's constructor may start threads before ours has run
  struct start* const start = calloc(1, sizeof(*start));
  if (!start) return EAGAIN;
  second_thread_started = 1;
  start->function = function;
  start->argument = argument;
  const int error = real(thread, attributes, run_thread, start);
  if (error) {
    free(start);
    return error;
  }
  start->turn = ask_for_turn();
  start->turn_is_set = 1;
  // Without a turn of our own the thread may have freed it by now; a wake reads nothing there.
  real_syscall(SYS_futex, &start->turn_is_set, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  REAL(pthread_join);
  return WAITING(real(thread, result));
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  REAL(pthread_mutex_lock);
  if (!second_thread_started || !has_turn) return real(mutex);
  const int error = pthread_mutex_trylock(mutex);
  return error == EBUSY ? WAITING(real(mutex)) : error;
}

int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  REAL(pthread_rwlock_rdlock);
  if (!second_thread_started || !has_turn) return real(lock);
  const int error = pthread_rwlock_tryrdlock(lock);
  return error == EBUSY ? WAITING(real(lock)) : error;
}

int pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  REAL(pthread_rwlock_wrlock);
  if (!second_thread_started || !has_turn) return real(lock);
  const int error = pthread_rwlock_trywrlock(lock);
  return error == EBUSY ? WAITING(real(lock)) : error;
}

// After a condition variable's wait the mutex is held, but it may not be while waiting for a turn:
// who runs may want it.
static void turn_without(pthread_mutex_t* mutex) {
  const unsigned turn = ask_for_turn();
  if (atomic_load(&turn_now) == turn) {
    has_turn = 1;
    return;
  }
  pthread_mutex_unlock(mutex);
  wait_for_turn(turn);
  pthread_mutex_lock(mutex);
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  REAL_CONDITION(pthread_cond_wait);
  if (!second_thread_started || !has_turn) return real(condition, mutex);
  end_turn();
  const int error = real(condition, mutex);
  turn_without(mutex);
  return error;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const struct timespec* until) {
  REAL_CONDITION(pthread_cond_timedwait);
  if (!second_thread_started || !has_turn) return real(condition, mutex, until);
  end_turn();
  const int error = real(condition, mutex, until);
  turn_without(mutex);
  return error;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  REAL(pthread_cond_clockwait);
  if (!second_thread_started || !has_turn) return real(condition, mutex, clock, until);
  end_turn();
  const int error = real(condition, mutex, clock, until);
  turn_without(mutex);
  return error;
}

int sem_wait(sem_t* semaphore) {
  REAL(sem_wait);
  return WAITING(real(semaphore));
}

int sem_timedwait(sem_t* semaphore, const struct timespec* until) {
  REAL(sem_timedwait);
  return WAITING(real(semaphore, until));
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const struct timespec* until) {
  REAL(sem_clockwait);
  return WAITING(real(semaphore, clock, until));
}

int sched_yield(void) {
  REAL(sched_yield);
  return WAITING(real());
}

int usleep(useconds_t microseconds) {
  REAL(usleep);
  return WAITING(real(microseconds));
}

int nanosleep(const struct timespec* time, struct timespec* left) {
  REAL(nanosleep);
  return WAITING(real(time, left));
}

// How C++'s futures, once flags and atomics wait.
long syscall(long number, ...) {
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (!real_syscall) first_thread();  // another library's constructor calls
  const long operation = a[1] & FUTEX_CMD_MASK;
  if (number == SYS_futex && (operation == FUTEX_WAIT || operation == FUTEX_WAIT_BITSET)) {
    return WAITING(real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]));
  }
  return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// libstdc++'s std::thread::hardware_concurrency, std::chrono::steady_clock::now and
// std::chrono::system_clock::now.
unsigned hardware_concurrency(void) __asm__("_ZNSt6thread20hardware_concurrencyEv");
int64_t steady_clock_now(void) __asm__("_ZNSt6chrono3_V212steady_clock3nowEv");
int64_t system_clock_now(void) __asm__("_ZNSt6chrono3_V212system_clock3nowEv");

unsigned hardware_concurrency(void) { return 1; }

static int64_t next_nanosecond(void) {
  static _Atomic int64_t microseconds = 0;
  return 1000 * atomic_fetch_add(&microseconds, 1);
}

int64_t steady_clock_now(void) { return next_nanosecond(); }

int64_t system_clock_now(void) { return INT64_C(1700000000000000000) + next_nanosecond(); }
