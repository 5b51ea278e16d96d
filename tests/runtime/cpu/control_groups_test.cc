// What control groups of both versions leave a process, from texts of their files.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/control_groups.h"

#include <map>

#include "check.h"

using namespace plansmith::cpu;

namespace {

using Files = std::map<std::string, std::string>;

ReadText Reader(const Files& files) {
  return [&files](const std::string& path) {
    const auto it = files.find(path);
    return it == files.end() ? std::string() : it->second;
  };
}

int Cores(const Files& files) { return QuotaCores(Reader(files), 64); }
uint64_t Left(const Files& files) { return GroupMemoryLeft(Reader(files)); }

void TestNumbers() {
  CHECK(FirstNumber("200000 100000\n", 7) == 200000 && FirstNumber("  12 kB", 7) == 12);
  CHECK(FirstNumber("max 100000\n", 7) == 7 && FirstNumber("-1\n", 7) == 7);
  CHECK(FirstNumber("", 7) == 7 && FirstNumber("   ", 7) == 7);
  const std::string text = "inactive_file 5\nactive_file 6\ntotal_active_file 8";
  CHECK(NumberIn(text, "active_file ", 0) == 6 && NumberIn(text, "inactive_file ", 0) == 5);
  CHECK(NumberIn(text, "total_active_file ", 0) == 8 && NumberIn(text, "file ", 3) == 3);
  CHECK(NumberIn("", "file ", 3) == 3);
}

void TestFolders() {
  const Files files = {{"/proc/self/cgroup",
                        "12:cpuset:/other\n4:cpu,cpuacct:/docker/ab:cd\n3:memory:/m\n"
                        "1:name=systemd:/s\nnonsense\n2:cpu\n0::/user.slice/a.service\n"}};
  const std::string root = "/sys/fs/cgroup";
  CHECK((GroupFolders(Reader(files), "") ==
         std::vector<std::string>{root + "/user.slice/a.service", root + "/user.slice", root}));
  CHECK(
      (GroupFolders(Reader(files), "cpu") ==
       std::vector<std::string>{root + "/cpu/docker/ab:cd", root + "/cpu/docker", root + "/cpu"}));
  CHECK((GroupFolders(Reader(files), "memory") ==
         std::vector<std::string>{root + "/memory/m", root + "/memory"}));
  // Mounted is the container's own group, or one beside this process's.
  for (const char* mounted : {"/docker/ab", "/docker/a"}) {
    const Files inside = {
        {"/proc/self/cgroup", "4:cpu:/docker/ab/sub\n"},
        {"/proc/self/mountinfo", "30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n41 30 0:35 " +
                                     std::string(mounted) +
                                     " /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu\n"}};
    const std::vector<std::string> found = GroupFolders(Reader(inside), "cpu");
    if (std::string(mounted) == "/docker/ab") {
      CHECK((found == std::vector<std::string>{root + "/cpu/sub", root + "/cpu"}));
    } else {
      CHECK(found.size() == 4 && found[0] == root + "/cpu/docker/ab/sub");
    }
  }
  const Files whole = {
      {"/proc/self/cgroup", "4:cpu:/docker/ab\n"},
      {"/proc/self/mountinfo", "1 2 0:3 /docker/ab /sys/fs/cgroup/cpu rw - a b\n"}};
  CHECK((GroupFolders(Reader(whole), "cpu") == std::vector<std::string>{root + "/cpu"}));
  // None told, or paths that are none: what lies outermost.
  for (const char* text : {"", "0::/", "0::", "0::a/b"}) {
    const Files other = {{"/proc/self/cgroup", text}};
    CHECK((GroupFolders(Reader(other), "") == std::vector<std::string>{root}));
  }
}

void TestCores() {
  const std::string root = "/sys/fs/cgroup";
  CHECK(Cores({}) == 64);
  CHECK(Cores({{root + "/cpu.max", "max 100000\n"}}) == 64);
  CHECK(Cores({{root + "/cpu.max", "200000 100000\n"}}) == 2);
  CHECK(Cores({{root + "/cpu.max", "200001 100000\n"}}) == 3);
  CHECK(Cores({{root + "/cpu.max", "1000 100000\n"}}) == 1);
  CHECK(Cores({{root + "/cpu.max", "99000000 100000\n"}}) == 64);
  for (const char* odd : {"", "max", "200000", "200000 ", "200000 0\n", "x y\n"}) {
    CHECK(Cores({{root + "/cpu.max", odd}}) == 64);
  }
  // The least of a group and those around it, which alone may be there.
  Files files = {{"/proc/self/cgroup", "0::/a/b\n"},
                 {root + "/a/b/cpu.max", "800000 100000\n"},
                 {root + "/a/cpu.max", "350000 100000\n"}};
  CHECK(Cores(files) == 4);
  files["/proc/self/cgroup"] = "0::/gone/b\n";
  CHECK(Cores(files) == 64);
  const auto version1 = [&](const char* quota, const char* period) {
    return Cores({{"/proc/self/cgroup", "3:cpuacct,cpu:/docker/x\n"},
                  {root + "/cpu/cpu.cfs_quota_us", quota},
                  {root + "/cpu/cpu.cfs_period_us", period}});
  };
  CHECK(version1("-1\n", "100000\n") == 64 && version1("150000\n", "100000\n") == 2);
  CHECK(version1("50000\n", "") == 64);
}

void TestMemory() {
  const std::string root = "/sys/fs/cgroup";
  CHECK(Left({}) == UINT64_MAX && Left({{root + "/memory.max", "max\n"}}) == UINT64_MAX);
  Files files = {{root + "/memory.max", "1000\n"}};
  CHECK(Left(files) == 1000);
  files[root + "/memory.current"] = "700\n";
  CHECK(Left(files) == 300);
  files[root + "/memory.stat"] = "anon 100\nfile 600\ninactive_file 200\nactive_file 50\n";
  CHECK(Left(files) == 550);
  files[root + "/memory.current"] = "200\n";  // read at another time than the table
  CHECK(Left(files) == 1000);
  files[root + "/memory.current"] = "5000\n";
  CHECK(Left(files) == 0);
  files["/proc/self/cgroup"] = "0::/a\n";
  files[root + "/memory.current"] = "100\n";
  files[root + "/a/memory.max"] = "900\n";
  files[root + "/a/memory.current"] = "450\n";
  CHECK(Left(files) == 450);
  files[root + "/a/memory.high"] = "500\n";
  CHECK(Left(files) == 50);
  const Files version1 = {
      {"/proc/self/cgroup", "3:memory:/docker/x\n"},
      {root + "/memory/docker/x/memory.limit_in_bytes", "5000\n"},
      {root + "/memory/docker/x/memory.usage_in_bytes", "4000\n"},
      {root + "/memory/docker/x/memory.stat",
       "inactive_file 1\nactive_file 2\ntotal_inactive_file 1000\ntotal_active_file 500\n"},
      {root + "/memory/memory.limit_in_bytes", "9223372036854771712\n"}};
  CHECK(Left(version1) == 2500);
}

}  // namespace

int main() {
  TestNumbers();
  TestFolders();
  TestCores();
  TestMemory();
  const int cores = QuotaCores(SmallFile, 3);  // of this machine, whatever it is
  CHECK(cores >= 1 && cores <= 3);
  CHECK(SmallFile("/no/such/file").empty());
  return 0;
}
