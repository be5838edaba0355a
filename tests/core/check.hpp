// What the core's tests share: a check that names its line, random numbers, and stores of raw chunks.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core.h"

#define CHECK(...)                                                                         \
    do {                                                                                   \
        if (!(__VA_ARGS__)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            std::fflush(stderr);                                                           \
            std::_Exit(1);                                                                 \
        }                                                                                  \
    } while (0)

// Tests register themselves; main runs those that the command line names.
struct Test {
    const char *name;
    void (*run)();
    Test *next;
    static Test *&first() {
        static Test *one = nullptr;
        return one;
    }
    Test(const char *name, void (*run)()) : name(name), run(run), next(first()) { first() = this; }
};
#define TEST(name)                              \
    static void name();                         \
    static const Test name##_test(#name, name); \
    static void name()

using Random = std::mt19937_64;
inline int64_t draw(Random &random, int64_t low, int64_t high) {  // both ends included
    return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// A folder that is removed again.
struct Folder {
    std::filesystem::path path;
    Folder() {
        std::string text = (std::filesystem::temp_directory_path() / "linumpy-core-XXXXXX").string();
        CHECK(mkdtemp(text.data()));
        path = text;
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
};

inline void write_file(const std::filesystem::path &path, const std::string &bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}
