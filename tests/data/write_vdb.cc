// Writes the .vdb files of vdb.zip into the current folder, with the values that OpenVDB reads back from them (.truth:
// int32 first and last voxel, then float32 of every voxel between). Written by OpenVDB 10.0.1:
//     g++ -std=c++17 write_vdb.cc -lopenvdb -ltbb -lImath-3_1 && ./a.out
#include <openvdb/io/File.h>
#include <openvdb/openvdb.h>

#include <cmath>
#include <cstdio>
#include <string>

using namespace openvdb;

static double value(int i, int j, int k) { return 0.25 * i - 0.5 * j + 0.125 * k + (i * 7 + j * 3 + k) % 5; }

// Voxels of several leaves and nodes, inactive ones with values of their own, and tiles of leaves.
template <class G> typename G::Ptr voxels(const char *name) {
    using V = typename G::ValueType;
    auto grid = G::create(V(3));
    grid->setName(name);
    auto at = grid->getAccessor();
    for (int i = -6; i < 12; i++)
        for (int j = -3; j < 6; j++)
            for (int k = 2; k < 13; k++)
                if ((i + j + k) % 3) at.setValue(Coord(i, j, k), V(value(i, j, k)));
    at.setValueOff(Coord(0, 0, 5), V(7));
    at.setValueOff(Coord(1, 0, 5), V(-3));
    grid->tree().addTile(1, Coord(16, 0, 0), V(2), true);
    grid->tree().addTile(1, Coord(24, 0, 0), V(4), false);
    at.setValue(Coord(30, 1, 1), V(value(30, 1, 1)));
    return grid;
}

template <class G> void write_truth(const std::string &file, const G &grid) {
    FILE *out = fopen((file + ".truth").c_str(), "wb");
    const CoordBBox box = grid.evalActiveVoxelBoundingBox();
    const Coord a = box.min(), b = box.max();
    const int ends[6] = {a.x(), a.y(), a.z(), b.x(), b.y(), b.z()};
    fwrite(ends, 4, 6, out);
    auto at = grid.getConstAccessor();
    for (int i = a.x(); i <= b.x(); i++)
        for (int j = a.y(); j <= b.y(); j++)
            for (int k = a.z(); k <= b.z(); k++) {
                const float v = float(at.getValue(Coord(i, j, k)));
                fwrite(&v, 4, 1, out);
            }
    fclose(out);
}

static void write(const std::string &file, const GridPtrVec &grids, uint32_t compression = io::COMPRESS_BLOSC | io::COMPRESS_ACTIVE_MASK) {
    io::File out(file + ".vdb");
    out.setCompression(compression);
    out.write(grids);
    out.close();
}

template <class G> void one(const std::string &file, uint32_t compression, bool half) {
    auto other = FloatGrid::create(0.f);
    other->setName("other");
    other->getAccessor().setValue(Coord(1, 2, 3), 1.f);
    auto grid = voxels<G>("density");
    grid->setSaveFloatAsHalf(half);
    write(file, {other, grid}, compression);
    io::File in(file + ".vdb");
    in.open();
    write_truth(file, *gridPtrCast<G>(in.readGrid("density")));
}

int main() {
    initialize();
    one<FloatGrid>("float_none", 0, false);
    one<FloatGrid>("float_mask", 2, false);
    one<FloatGrid>("float_zip", 1, false);
    one<FloatGrid>("float_zip_mask", 3, false);
    one<FloatGrid>("float_blosc_mask", 6, false);
    one<FloatGrid>("float_half_blosc_mask", 6, true);
    one<FloatGrid>("float_half_zip", 1, true);
    one<DoubleGrid>("double_blosc_mask", 6, false);
    one<Int32Grid>("int32_blosc", 4, false);
    one<Int64Grid>("int64_zip_mask", 3, false);

    auto surface = FloatGrid::create(3.f);  // inactive values inside and outside
    surface->setName("surface");
    surface->setGridClass(GRID_LEVEL_SET);
    auto at = surface->getAccessor();
    for (int i = -14; i < 15; i++)
        for (int j = -14; j < 15; j++)
            for (int k = -14; k < 15; k++) {
                const double d = std::sqrt(double(i * i + j * j + k * k)) - 10;
                if (std::fabs(d) < 3) at.setValue(Coord(i, j, k), float(d));
                else if (d < 0) at.setValueOff(Coord(i, j, k), -3.f);
            }
    write("level_set", {surface});
    write_truth("level_set", *surface);

    auto tiles = FloatGrid::create(0.5f);  // of the upper levels
    tiles->setName("tiles");
    tiles->tree().addTile(2, Coord(128, 0, 0), 2.f, true);
    tiles->getAccessor().setValue(Coord(127, 64, 64), 9.f);
    tiles->getAccessor().setValue(Coord(127, 65, 64), 5.f);
    tiles->tree().addTile(3, Coord(-4096, 0, 0), 7.f, true);
    write("tiles", {tiles});

    auto vector = Vec3SGrid::create(Vec3s(1, 2, 3));
    vector->setName("velocity");
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++)
            for (int k = 0; k < 9; k++) vector->getAccessor().setValue(Coord(i, j, k), Vec3s(i, j, k + .5f));
    write("vector", {vector});

    auto first = voxels<FloatGrid>("a");
    auto second = first->copy();  // shares the tree
    second->setName("b");
    write("instance", {first, second});
}
