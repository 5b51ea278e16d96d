// A step that ran before allocates nothing and asks nothing of the system but to put a thread to
// sleep and to wake it: a filter in the kernel watches.
//
// SPDX-License-Identifier: Apache-2.0
#include "../count_allocations.h"
#include "steps.h"
#include "tiny_model.h"

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#define CAN_FILTER 1
#endif

using namespace plansmith::cpu;

namespace {

struct Run {
  explicit Run(const TinyShape& shape, int threads, const std::string& path)
      : executor(path, threads, false, nullptr, LoraLimits{0, 0}, WeightsIn::kAuto, false),
        steps(executor.Describe(), 4) {
    CHECK(shape.max_tokens == 64);
    if (shape.plain_logits) steps.WantCandidates(7);
    executor.Open(steps.num_blocks());
  }
  // One token, four sequences, a long prompt, a mix of both; no logits at all.
  void AllShapes() {
    for (size_t s = 0; s < 4; ++s) steps.Rewind(s, 0);
    for (const std::vector<int32_t>* counts : {&prompt, &one, &four, &mixed, &one}) {
      const psm_batch& batch = steps.Next(*counts, 7, counts != &mixed);
      const float* logits = executor.Step(batch);
      sum += batch.num_logits_rows > 0 ? logits[0] : 0;
      CHECK(batch.num_logits_rows == 0 || batch.num_candidates == 0 ||
            (batch.candidates[6].token_id >= 0 && logits[0] <= batch.candidates[0].logit));
    }
  }

  Executor executor;
  Steps steps;
  const std::vector<int32_t> prompt = {40, 0, 0, 0}, one = {1, 0, 0, 0}, four = {1, 1, 1, 1},
                             mixed = {1, 30, 1, 17};
  float sum = 0;
};

#ifdef CAN_FILTER

void Report(int, siginfo_t* info, void*) {
  char text[] = "a step made system call 000\n";
  int number = info->si_syscall;
  for (char* digit = text + sizeof(text) - 3; *digit != ' '; --digit, number /= 10) {
    *digit = static_cast<char>('0' + number % 10);
  }
  if (write(2, text, sizeof(text) - 1) < 0) _exit(2);
  _exit(1);
}

// Whether reading the clock is done without the kernel on this machine.
bool ClockIsMapped() {
  std::string name;
  std::getline(std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
               name);
  return name == "tsc" || name == "kvm-clock" || name == "arch_sys_counter";
}

// From here on, on all threads. False where this process may not.
bool Forbid() {
  struct sigaction action = {};
  action.sa_sigaction = Report;
  action.sa_flags = SA_SIGINFO;
  CHECK(sigaction(SIGSYS, &action, nullptr) == 0);
  const uint32_t clock = ClockIsMapped() ? SYS_futex : SYS_clock_gettime;
  const uint32_t allowed[] = {SYS_futex,      SYS_write,        SYS_exit,
                              SYS_exit_group, SYS_rt_sigreturn, clock};
  std::vector<sock_filter> code = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
  for (uint32_t call : allowed) {
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  }
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
  const sock_fprog program = {static_cast<unsigned short>(code.size()), code.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

#endif

void RunQuietly(const TinyShape& shape, int threads, const std::string& path) {
  Run run(shape, threads, path);
  run.AllShapes();
  const int64_t before = num_news;
  run.AllShapes();
  CHECK(num_news == before);
#ifdef CAN_FILTER
  if (!Forbid()) {
    printf("this process may not filter system calls: left out\n");
    fflush(stdout);
    _exit(0);
  }
  for (int i = 0; i < 20; ++i) run.AllShapes();
  _exit(run.sum == run.sum ? 0 : 3);  // closing would unmap its memory
#endif
}

// In a process of its own, which can never again do more.
void Check(const TinyShape& shape, int threads) {
  const TempFile file;
  file.Write(TinyModel(shape).plan.Bytes());
#ifdef CAN_FILTER
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) RunQuietly(shape, threads, file.path());
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#else
  RunQuietly(shape, threads, file.path());
#endif
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3}) {
    TinyShape shape;
    Check(shape, threads);
    shape.dtype = kI8;
    shape.group_size = 8;
    shape.by_group = true;
    shape.inner = 64;
    Check(shape, threads);
    shape.plain_logits = true;  // with candidates
    Check(shape, threads);
    shape.kv_format = kKvI8;
    shape.gather_early = true;
    Check(shape, threads);
  }
  return 0;
}
