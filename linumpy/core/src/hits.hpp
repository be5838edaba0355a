// Rows of slabs for chunks that are kept on the device: no file is read.
#pragma once

#include "device.hpp"

namespace lc {

// Collects the boxes of kept chunks, and commits them to slabs.
class KeptRows {
public:
    KeptRows(Wave &wave, Device &device, u32 chunks);
    ~KeptRows();
    KeptRows(const KeptRows &) = delete;
    KeptRows &operator=(const KeptRows &) = delete;

    // Add the boxes of a chunk, and take over the pin of its slot. Throws DriverError.
    void add(const WantedChunk &chunk, KeptSlot &slot);
    void commit();

private:
    Wave &wave_;
    Device &device_;
    std::vector<WantedBox *> boxes_;
    std::vector<Row> rows_;
    KeptUse use_;
    std::vector<KeptSlot *> unread_;
};

}  // namespace lc
