// The instructions of AMX on a machine that has none: each of them raises SIGILL, whose handler
// does what it says and steps over it. So the code that is tested is the code that ships, to the
// byte.
//
// From the instructions' description in Intel's manual, and independent of the kernels: the shapes
// come from ldtilecfg, a tile is a register of bytes, and what the manual makes a fault is a failed
// check here. For one thread.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include "check.h"

namespace plansmith {
namespace cpu {

class AmxTrap {
 public:
  // From now on, in this process.
  static void Install() {
    struct sigaction action = {};
    action.sa_sigaction = Handle;
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGILL, &action, nullptr) == 0);
  }
  static bool is_configured() { return configured_; }
  static uint64_t num_dots() { return num_dots_; }

 private:
  struct Tile {
    uint32_t rows, row_bytes;
    uint8_t data[16][64];
  };

  // A VEX instruction of three prefix bytes.
  struct Instruction {
    uint32_t prefix, opcode;  // prefix: 0 none, 1 66, 2 F3, 3 F2
    uint32_t reg, vvvv, rm;   // rm: of a register operand
    bool is_register;
    uint8_t* memory;
    size_t stride;  // of a memory operand with an index
    size_t size;
  };

  static uint64_t Register(const ucontext_t& context, uint32_t number) {
    static const int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                     REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                     REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<uint64_t>(context.uc_mcontext.gregs[kRegisters[number]]);
  }

  static Instruction Decode(const ucontext_t& context) {
    const uint64_t start = static_cast<uint64_t>(context.uc_mcontext.gregs[REG_RIP]);
    const uint8_t* p = reinterpret_cast<const uint8_t*>(start);
    CHECK(p[0] == 0xC4 && (p[1] & 31) == 2 && (p[2] & 0x84) == 0);  // 0F38, W0, 128 bits
    Instruction i = {};
    i.prefix = p[2] & 3;
    i.vvvv = ~(p[2] >> 3) & 15;
    i.opcode = p[3];
    const uint32_t mode = p[4] >> 6, rm = p[4] & 7;
    const uint32_t x = p[1] & 0x40 ? 0 : 8, b = p[1] & 0x20 ? 0 : 8;
    i.reg = (p[4] >> 3 & 7) + (p[1] & 0x80 ? 0 : 8);
    i.is_register = mode == 3;
    i.rm = rm + b;
    const uint8_t* next = p + 5;
    if (!i.is_register) {
      uint64_t address = 0;
      const bool has_sib = rm == 4;
      uint32_t base = rm;
      if (has_sib) {
        const uint32_t index = (*next >> 3 & 7) + x;
        base = *next & 7;
        if (index != 4) i.stride = Register(context, index) << (*next >> 6);
        ++next;
      }
      const bool no_base = mode == 0 && base == 5;
      if (!no_base) address = Register(context, base + b);
      if (mode == 1) {
        address += static_cast<uint64_t>(static_cast<int8_t>(*next));
        next += 1;
      } else if (mode == 2 || no_base) {
        int32_t displacement;
        memcpy(&displacement, next, 4);
        address += static_cast<uint64_t>(displacement);
        next += 4;
      }
      if (no_base && !has_sib) address += reinterpret_cast<uint64_t>(next);  // relative to RIP
      i.memory = reinterpret_cast<uint8_t*>(address);
    }
    i.size = static_cast<size_t>(next - p);
    return i;
  }

  static void Handle(int, siginfo_t*, void* context_pointer) {
    ucontext_t* context = static_cast<ucontext_t*>(context_pointer);
    const Instruction i = Decode(*context);
    if (i.opcode == 0x49 && i.prefix == 0) {
      if (i.is_register) {
        CHECK(i.reg == 0 && i.rm == 0);
        Release();
      } else {
        Configure(i.memory);
      }
    } else {
      CHECK(configured_ && i.reg < 8);
      Tile& tile = tiles_[i.reg];
      CHECK(tile.rows > 0 && tile.row_bytes > 0);
      if (i.opcode == 0x49 && i.prefix == 3 && i.is_register) {
        memset(tile.data, 0, sizeof(tile.data));
      } else if (i.opcode == 0x4B && i.prefix == 3 && !i.is_register) {
        Load(&tile, i);
      } else if (i.opcode == 0x4B && i.prefix == 2 && !i.is_register) {
        for (uint32_t row = 0; row < tile.rows; ++row) {
          memcpy(i.memory + row * i.stride, tile.data[row], tile.row_bytes);
        }
      } else {
        CHECK(i.opcode == 0x5E && i.is_register && i.rm < 8 && i.vvvv < 8);
        Dot(&tile, tiles_[i.rm], tiles_[i.vvvv], i.prefix);
      }
    }
    context->uc_mcontext.gregs[REG_RIP] += static_cast<greg_t>(i.size);
  }

  static void Release() {
    configured_ = false;
    memset(tiles_, 0, sizeof(tiles_));
  }
  static void Configure(const uint8_t* shapes) {
    CHECK(shapes[0] == 1);                                   // the palette of eight tiles
    for (int at = 1; at < 16; ++at) CHECK(shapes[at] == 0);  // start_row and what is reserved
    memset(tiles_, 0, sizeof(tiles_));
    for (int t = 0; t < 16; ++t) {
      uint16_t row_bytes;
      memcpy(&row_bytes, shapes + 16 + 2 * t, 2);
      const uint32_t rows = shapes[48 + t];
      CHECK(rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0));
      CHECK(t < 8 || rows == 0);
      if (t < 8) tiles_[t].rows = rows;
      if (t < 8) tiles_[t].row_bytes = row_bytes;
    }
    configured_ = true;
  }
  static void Load(Tile* tile, const Instruction& i) {
    memset(tile->data, 0, sizeof(tile->data));
    for (uint32_t row = 0; row < tile->rows; ++row) {
      memcpy(tile->data[row], i.memory + row * i.stride, tile->row_bytes);
    }
  }
  // sum[m][n] += a[m][k] * b[k / 4][4 n + k % 4]; the prefix says which side is signed.
  static void Dot(Tile* sum, const Tile& a, const Tile& b, uint32_t prefix) {
    CHECK(sum != &a && sum != &b && &a != &b);
    CHECK(sum->rows == a.rows && sum->row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
    CHECK(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0);
    const bool a_signed = prefix >= 2, b_signed = prefix % 2 == 1;
    for (uint32_t m = 0; m < sum->rows; ++m) {
      for (uint32_t n = 0; n < sum->row_bytes / 4; ++n) {
        int32_t total;
        memcpy(&total, sum->data[m] + 4 * n, 4);
        for (uint32_t k = 0; k < a.row_bytes; ++k) {
          const uint8_t x = a.data[m][k], y = b.data[k / 4][4 * n + k % 4];
          total +=
              (a_signed ? static_cast<int8_t>(x) : x) * (b_signed ? static_cast<int8_t>(y) : y);
        }
        memcpy(sum->data[m] + 4 * n, &total, 4);
      }
    }
    ++num_dots_;
  }

  static inline bool configured_ = false;
  static inline uint64_t num_dots_ = 0;
  static inline Tile tiles_[8] = {};
};

}  // namespace cpu
}  // namespace plansmith
