// Which LoRA adapters are loaded, in which of the executor's slots, and how many requests use them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "status.h"

namespace plansmith {

// Guarded by the engine's mutex.
class AdapterTable {
 public:
  explicit AdapterTable(int32_t max_adapters) : taken_(static_cast<size_t>(max_adapters)) {}

  // A slot for a new adapter. Throws INVALID_ARGUMENT, OUT_OF_MEMORY.
  int32_t FreeSlot(uint64_t adapter_id) const {
    if (adapter_id == 0) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                        "adapter_id is 0, which stands for none; give the adapter another number");
    }
    if (adapters_.count(adapter_id) != 0) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                        Format("adapter %llu is loaded already; unload it first or take another id",
                               static_cast<unsigned long long>(adapter_id)));
    }
    for (size_t slot = 0; slot < taken_.size(); ++slot) {
      if (!taken_[slot]) return static_cast<int32_t>(slot);
    }
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("%zu adapters are loaded, the executor's max_adapters; unload one or "
                             "open it with more",
                             taken_.size()));
  }
  void Add(uint64_t adapter_id, int32_t slot) {
    adapters_[adapter_id] = {slot, 0};
    taken_[static_cast<size_t>(slot)] = true;
  }
  // A request begins (+1) or ends (-1) to use it; its slot. Throws NOT_FOUND.
  int32_t Use(uint64_t adapter_id, int32_t change) {
    Adapter& adapter = Find(adapter_id);
    adapter.num_requests += change;
    return adapter.slot;
  }
  // The slot of an adapter that nobody uses. Throws NOT_FOUND, INVALID_ARGUMENT.
  int32_t UnusedSlot(uint64_t adapter_id) {
    const Adapter& adapter = Find(adapter_id);
    if (adapter.num_requests > 0) {
      throw StatusError(
          PSM_ERROR_INVALID_ARGUMENT,
          Format("adapter %llu is in use by %d requests; wait for them or cancel them",
                 static_cast<unsigned long long>(adapter_id), adapter.num_requests));
    }
    return adapter.slot;
  }
  void Remove(uint64_t adapter_id) {
    taken_[static_cast<size_t>(Find(adapter_id).slot)] = false;
    adapters_.erase(adapter_id);
  }

 private:
  struct Adapter {
    int32_t slot;
    int32_t num_requests;
  };
  Adapter& Find(uint64_t adapter_id) {
    const auto found = adapters_.find(adapter_id);
    if (found == adapters_.end()) {
      throw StatusError(PSM_ERROR_NOT_FOUND,
                        Format("no adapter %llu is loaded (%zu are); load it first",
                               static_cast<unsigned long long>(adapter_id), adapters_.size()));
    }
    return found->second;
  }

  std::unordered_map<uint64_t, Adapter> adapters_;
  std::vector<bool> taken_;
};

}  // namespace plansmith
