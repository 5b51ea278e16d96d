// SPDX-License-Identifier: Apache-2.0
#include "cpu/lora_sites.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <string>

namespace plansmith {
namespace cpu {
namespace {

constexpr int32_t kNumModules = PSM_LORA_MLP_GATE;  // ids from 1
// By id; as the graph calls them.
constexpr const char* kNames[kNumModules + 1] = {"?", "q", "k", "v", "o", "up", "down", "gate"};

int32_t ModuleOf(const std::string& name) {
  for (int32_t id = 1; id <= kNumModules; ++id) {
    if (name == kNames[id]) return id;
  }
  return 0;
}

// The modules of a product named "layers.<layer>.<module>[|<module>...]"; none for other names.
std::vector<int32_t> Modules(const char* name, int32_t* layer) {
  int used = 0;
  std::vector<int32_t> modules;
  if (sscanf(name, "layers.%6d.%n", layer, &used) != 1 || used == 0 || *layer < 0) return {};
  for (const char* at = name + used;; ++at) {
    const size_t length = strcspn(at, "|");
    modules.push_back(ModuleOf(std::string(at, length)));
    if (modules.back() == 0) return {};
    at += length;
    if (*at == '\0') return modules;
  }
}

// Columns of a matrix's result. The inner width of the MLP stands nowhere in the plan: it is an
// equal share of a product that holds nothing else.
uint32_t OutFeatures(const PlanHeader& h, int32_t module, uint32_t product_rows, size_t num_parts) {
  switch (module) {
    case PSM_LORA_ATTN_Q:
      return static_cast<uint32_t>(h.num_heads) * static_cast<uint32_t>(h.head_dim);
    case PSM_LORA_ATTN_K:
    case PSM_LORA_ATTN_V:
      return static_cast<uint32_t>(h.num_kv_heads) * static_cast<uint32_t>(h.head_dim);
    case PSM_LORA_MLP_UP:
    case PSM_LORA_MLP_GATE:
      return product_rows / static_cast<uint32_t>(num_parts);
    default:
      return static_cast<uint32_t>(h.hidden_size);
  }
}

}  // namespace

const char* LoraModuleName(int32_t module) {
  return kNames[module >= 1 && module <= kNumModules ? module : 0];
}

LoraSites::LoraSites(const Plan& plan) {
  const PlanHeader& h = plan.header();
  site_of_op_.assign(h.num_ops, -1);
  part_of_.assign(static_cast<size_t>(h.num_layers) * (kNumModules + 1), -1);
  bool all_fit = true;
  for (size_t i = 0; i < h.num_ops; ++i) {
    if (plan.op(i).code == kOpLinear) all_fit = all_fit && AddOp(plan, i);
  }
  if (all_fit && parts_.size() == static_cast<size_t>(h.num_layers * kNumModules)) return;
  sites_.clear();
  parts_.clear();
  std::fill(site_of_op_.begin(), site_of_op_.end(), -1);
  std::fill(part_of_.begin(), part_of_.end(), -1);
}

// False when the name is a layer's and the rest of the op does not agree.
bool LoraSites::AddOp(const Plan& plan, size_t op_idx) {
  const OpRecord& op = plan.op(op_idx);
  const TensorRecord& w = plan.tensor(static_cast<size_t>(op.tensors[0]));
  int32_t layer = 0;
  const std::vector<int32_t> modules = Modules(plan.string(op.name), &layer);
  if (modules.empty()) return true;
  if (layer >= plan.header().num_layers) return false;
  const LoraSite site = {plan.slot(static_cast<size_t>(op.out.slot)).rows, parts_.size(),
                         modules.size()};
  uint32_t col = 0;
  for (const int32_t module : modules) {
    int32_t& part = part_of_[static_cast<size_t>(layer * (kNumModules + 1) + module)];
    if (part >= 0) return false;
    part = static_cast<int32_t>(parts_.size());
    const uint32_t width = OutFeatures(plan.header(), module, w.rows, modules.size());
    parts_.push_back({layer, module, col, w.cols, width});
    col += width;
  }
  site_of_op_[op_idx] = static_cast<int32_t>(sites_.size());
  sites_.push_back(site);
  return col == w.rows;
}

int32_t LoraSites::SiteOf(size_t op_idx) const { return site_of_op_[op_idx]; }

int32_t LoraSites::PartOf(int32_t layer, int32_t module) const {
  if (module < 1 || module > kNumModules || layer < 0) return -1;
  const size_t at = static_cast<size_t>(layer) * (kNumModules + 1) + static_cast<size_t>(module);
  return at < part_of_.size() ? part_of_[at] : -1;
}

}  // namespace cpu
}  // namespace plansmith
