// What the control groups that this process is in leave it of the machine: a container's limits, or
// a service's. Of version 1 and 2, where the system has its groups at /sys/fs/cgroup.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace plansmith {
namespace cpu {

// A file's text, empty when there is no such file.
using ReadText = std::function<std::string(const std::string& path)>;

// The first 256 KiB, more than the kernel's tables have.
inline std::string SmallFile(const std::string& path) {
  std::string text(256 << 10, '\0');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  size_t bytes = 0;
  for (ssize_t n = 1; n > 0 && bytes < text.size();) {
    n = read(fd, &text[bytes], text.size() - bytes);
    if (n > 0) bytes += static_cast<size_t>(n);
  }
  close(fd);
  text.resize(bytes);
  return text;
}

// The number with which the text begins, `otherwise` where it begins with none ("max"), or with
// one below 0.
inline uint64_t FirstNumber(const std::string& text, uint64_t otherwise) {
  const size_t at = text.find_first_not_of(' ');
  if (at == std::string::npos || text[at] < '0' || text[at] > '9') return otherwise;
  return strtoull(text.c_str() + at, nullptr, 10);
}

// The number behind `name` at the beginning of a line.
inline uint64_t NumberIn(const std::string& text, const std::string& name, uint64_t otherwise) {
  const size_t at = ("\n" + text).find("\n" + name);
  return at == std::string::npos ? otherwise
                                 : FirstNumber(text.substr(at + name.size()), otherwise);
}

// Which group is the outermost that can be seen at `point`, "/" where no mount is told: within a
// container that may be its own, which the host, and so /proc/self/cgroup, calls /docker/<id>.
inline std::string MountedGroup(const ReadText& read, const std::string& point) {
  std::istringstream mounts(read("/proc/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {  // id parent device root point ..
    std::istringstream words(line);
    std::string skipped, root, at;
    if (words >> skipped >> skipped >> skipped >> root >> at && at == point) return root;
  }
  return "/";
}

// The folders of this process's group and those around it, innermost first. Version 1 has one tree
// a controller, version 2 one for all, and its name is empty. Where the path is not below the group
// that is mounted, only the outermost folder may be there.
inline std::vector<std::string> GroupFolders(const ReadText& read, const std::string& controller) {
  const std::string root = "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller);
  const std::string mounted = MountedGroup(read, root) + "/";
  const std::string groups = read("/proc/self/cgroup");
  std::vector<std::string> folders;
  for (size_t at = 0, end; at < groups.size(); at = end + 1) {  // number:controllers:path
    end = std::min(groups.find('\n', at), groups.size());
    const std::string line = groups.substr(at, end - at);
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (names.find("," + controller + ",") == std::string::npos || path.find('/') != 0) continue;
    if (mounted.size() > 2 && (path + "/").compare(0, mounted.size(), mounted) == 0) {
      path.erase(0, mounted.size() - 1);
    }
    for (; path.size() > 1; path.resize(path.rfind('/'))) folders.push_back(root + path);
  }
  folders.push_back(root);
  return folders;
}

// How many cores' time the quotas leave, rounded up, at least 1; `otherwise` without any.
inline int QuotaCores(const ReadText& read, int otherwise) {
  uint64_t cores = static_cast<uint64_t>(otherwise);
  const auto limit = [&](uint64_t quota, uint64_t period) {
    if (quota == UINT64_MAX || period == 0) return;
    cores = std::min(cores, std::max<uint64_t>(1, quota / period + (quota % period != 0)));
  };
  for (const std::string& folder : GroupFolders(read, "")) {
    const std::string text = read(folder + "/cpu.max");  // "quota period" or "max period"
    const size_t blank = text.find(' ');
    if (blank != std::string::npos) {
      limit(FirstNumber(text, UINT64_MAX), FirstNumber(text.substr(blank), 0));
    }
  }
  for (const std::string& folder : GroupFolders(read, "cpu")) {
    limit(FirstNumber(read(folder + "/cpu.cfs_quota_us"), UINT64_MAX),
          FirstNumber(read(folder + "/cpu.cfs_period_us"), 0));
  }
  return static_cast<int>(cores);
}

// What the groups' limits leave of memory, in bytes: a limit less what is in use, but for pages of
// files, which can go. UINT64_MAX without a limit.
inline uint64_t GroupMemoryLeft(const ReadText& read) {
  uint64_t left = UINT64_MAX;
  const auto limit = [&](const std::string& folder, const char* most, const char* in_use,
                         const std::string& prefix) {
    const uint64_t bytes = FirstNumber(read(folder + most), UINT64_MAX);
    if (bytes == UINT64_MAX) return;
    const std::string stat = read(folder + "/memory.stat");
    const uint64_t files =
        NumberIn(stat, prefix + "active_file ", 0) + NumberIn(stat, prefix + "inactive_file ", 0);
    const uint64_t used = FirstNumber(read(folder + in_use), 0);
    left = std::min(left, bytes - std::min(bytes, used - std::min(used, files)));
  };
  for (const std::string& folder : GroupFolders(read, "")) {
    limit(folder, "/memory.max", "/memory.current", "");
    limit(folder, "/memory.high", "/memory.current", "");  // beyond it everything slows down
  }
  for (const std::string& folder : GroupFolders(read, "memory")) {
    limit(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_");
  }
  return left;
}

}  // namespace cpu
}  // namespace plansmith
