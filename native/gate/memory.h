// What PyTorch says where there is not enough memory.
#ifndef LOWTIDE_MEMORY_H
#define LOWTIDE_MEMORY_H

#include <c10/util/Exception.h>

#include <string>

namespace lowtide {

inline bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      std::string(error.what_without_backtrace()).find("can't allocate memory") !=
      std::string::npos;
}

}  // namespace lowtide
#endif
