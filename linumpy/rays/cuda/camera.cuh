// Pixels, lenses and poses: an image and random numbers → a pixel, and origin and direction of its ray.
struct Image {
    uint64 pixels, rays, distortion, cdf_y, cdf_x;  // addresses
    int width, height, format, lens, map_width, map_height, cdf_width, cdf_height, straight, rays_in_camera;
    float focal[2], principal[2], lens_params[6], shutter[4];
    float rotation[9], translation[3], motion[3], axis[3], angle;
};
static_assert(sizeof(Image) == IMAGE_NBYTES, "the layout of RECORD in linumpy.rays.images");

struct Vector { float x, y, z; };

// The first index whose cumulative value is above u; the last index if there is none.
__device__ inline int first_above(const float *cdf, int size, float u) {
    int low = 0, high = size - 1;
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (cdf[middle] > u) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The probability of a cell; the last cell includes the rounding error.
__device__ inline float probability_of(const float *cdf, int size, int cell) {
    return (cell < size - 1 ? cdf[cell] : 1.0f) - (cell ? cdf[cell - 1] : 0.0f);
}

// The position in [0, 1) at which the cumulative distribution of an axis reaches u; sets its cell and the density there.
__device__ inline float drawn(const float *cdf, int size, float u, int &cell, float &pdf) {
    cell = first_above(cdf, size, u);
    const float probability = probability_of(cdf, size, cell), cells = static_cast<float>(size);
    const float part = fminf((u - (cell ? cdf[cell - 1] : 0.0f)) / probability, 0.99999994f);
    pdf = probability * cells;
    return fminf((static_cast<float>(cell) + part) / cells, 0.99999994f);
}

__device__ inline void draw_pixel(const Image &image, bool snap, float &u, float &v, int &column, int &row,
                                  float &pdf) {
    pdf = 1.0f;
#if WEIGHTED
    if (image.cdf_y) {
        int cell;
        float of_row, of_column;
        v = drawn(reinterpret_cast<const float *>(image.cdf_y), image.cdf_height, v, cell, of_row);
        const float *const line =
            reinterpret_cast<const float *>(image.cdf_x) + static_cast<int64>(cell) * image.cdf_width;
        u = drawn(line, image.cdf_width, u, cell, of_column);
        pdf = of_row * of_column;
    }
#endif
    const float width = static_cast<float>(image.width), height = static_cast<float>(image.height);
    column = min(static_cast<int>(u * width), image.width - 1);
    row = min(static_cast<int>(v * height), image.height - 1);
    if (snap) {
        u = (static_cast<float>(column) + 0.5f) / width;
        v = (static_cast<float>(row) + 0.5f) / height;
    }
}

// Read linear, premultiplied RGBA; false if the pixel is masked. `linear` maps bytes of sRGB to linear values.
__device__ inline bool read_pixel(const Image &image, const float *linear, int column, int row, float (&rgba)[4]) {
    const int64 index = static_cast<int64>(row) * image.width + column;
    bool unmasked;
    if (image.format == 0) {
        const unsigned bytes = reinterpret_cast<const unsigned *>(image.pixels)[index];
        for (int c = 0; c < 3; ++c) rgba[c] = linear[bytes >> 8 * c & 255u];
        rgba[3] = static_cast<float>(bytes >> 24) / 255.0f;
        unmasked = bytes != 0x00FF00FFu;
    } else {
        for (int c = 0; c < 4; ++c)
            rgba[c] = image.format == 1 ? as_float(reinterpret_cast<const half_bits *>(image.pixels)[index * 4 + c])
                                        : reinterpret_cast<const float *>(image.pixels)[index * 4 + c];
        unmasked = !(rgba[0] < 0.0f);
    }
    if (image.straight)
        for (int c = 0; c < 3; ++c) rgba[c] *= rgba[3];
    return unmasked;
}

__device__ inline bool normalize(Vector &d, float &length) {
    length = sqrtf(d.x * d.x + d.y * d.y + d.z * d.z);
    if (!(length > 1e-30f && length < 1e30f)) return false;
    d = {d.x / length, d.y / length, d.z / length};
    return true;
}

// Undo OpenCV's radial and tangential distortion by Newton's method; false without a solution.
__device__ inline bool undistort(const float *k, float x, float y, float &px, float &py) {
    px = x, py = y;
    float error_x = 0.0f, error_y = 0.0f;
    for (int step = 0;; ++step) {
        const float r2 = px * px + py * py, slope = 2.0f * (k[0] + 2.0f * k[1] * r2);
        const float radial = 1.0f + r2 * (k[0] + k[1] * r2), xy = 2.0f * px * py;
        error_x = px * radial + k[2] * xy + k[3] * (r2 + 2.0f * px * px) - x;
        error_y = py * radial + k[3] * xy + k[2] * (r2 + 2.0f * py * py) - y;
        const float xx = radial + px * px * slope + 2.0f * k[2] * py + 6.0f * k[3] * px;
        const float yy = radial + py * py * slope + 2.0f * k[3] * px + 6.0f * k[2] * py;
        const float cross = px * py * slope + 2.0f * k[2] * px + 2.0f * k[3] * py;
        const float determinant = xx * yy - cross * cross;
        if (!(determinant > 1e-6f)) return false;  // beyond the fold of the distortion
        if (step == NEWTON_STEPS) break;
        px = px - (yy * error_x - cross * error_y) / determinant;
        py = py - (xx * error_y - cross * error_x) / determinant;
    }
    return fabsf(error_x) + fabsf(error_y) < 1e-4f * (1.0f + fabsf(x) + fabsf(y));
}

// The angle from the axis that a fisheye lens maps to a distance; negative if there is no such angle.
__device__ inline float fisheye_angle(const float *k, float distance) {
    float angle = fminf(distance, 1.5707964f), error = 0.0f;
    for (int step = 0;; ++step) {
        const float q = angle * angle;
        error = angle * (1.0f + q * (k[0] + q * (k[1] + q * (k[2] + q * k[3])))) - distance;
        const float slope = 1.0f + q * (3.0f * k[0] + q * (5.0f * k[1] + q * (7.0f * k[2] + q * (9.0f * k[3]))));
        if (!(slope > 1e-6f)) return -1.0f;
        if (step == NEWTON_STEPS) break;
        angle = angle - error / slope;
    }
    return fabsf(error) < 1e-4f * (1.0f + distance) ? angle : -1.0f;
}

// The direction at an angle from the axis towards (x, y), a vector of length `r`.
__device__ inline bool at_angle(float angle, float x, float y, float r, Vector &d) {
    if (!(angle >= 0.0f && angle <= 3.1415927f)) return false;
    float sine, cosine;
    sine_cosine(angle, sine, cosine);
    d = {0.0f, 0.0f, cosine};
    if (r > 0.0f) d.x = x / r * sine, d.y = y / r * sine;
    return true;
}

__device__ inline bool on_sphere(float longitude, float latitude, Vector &d) {
    if (!(fabsf(longitude) <= 3.1415929f && fabsf(latitude) <= 1.5707965f)) return false;
    float sine, cosine, sine_of_latitude, cosine_of_latitude;
    sine_cosine(longitude, sine, cosine);
    sine_cosine(latitude, sine_of_latitude, cosine_of_latitude);
    d = {sine * cosine_of_latitude, sine_of_latitude, cosine * cosine_of_latitude};
    return true;
}

// Origin and direction in the camera's axes; false where the lens has no ray.
__device__ inline bool lens_ray(const Image &image, float u, float v, Vector &o, Vector &d) {
    const float from_x = u * static_cast<float>(image.width) - image.principal[0];
    const float from_y = v * static_cast<float>(image.height) - image.principal[1];
    const float x = from_x / image.focal[0], y = from_y / image.focal[1];
    const float *const k = image.lens_params;
    o = {0.0f, 0.0f, 0.0f};
    d = {x, y, 1.0f};
    switch (image.lens) {
        case 1:
            return undistort(k, x, y, d.x, d.y);
        case 2: {
            const float r = sqrtf(x * x + y * y);
            return at_angle(fisheye_angle(k, r), x, y, r, d);
        }
        case 3: {
            const float r = sqrtf(from_x * from_x + from_y * from_y);
            return at_angle(k[0] + r * (k[1] + r * (k[2] + r * (k[3] + r * k[4]))), from_x, from_y, r, d);
        }
        case 4:
            return on_sphere(x, y, d);
        case 5:
            return on_sphere((u - 0.5f) * 6.2831855f, (v - 0.5f) * 3.1415927f, d);
        case 6:
            o = {x, y, 0.0f}, d = {0.0f, 0.0f, 1.0f};
            return true;
        default:
            return true;
    }
}

// Interpolate a distortion map (height, width, 2), whose cells have their centres at (k + 0.5) / size.
__device__ inline void distortion_at(const Image &image, float u, float v, float (&shift)[2]) {
    const int width = image.map_width, height = image.map_height;
    const float x = fminf(fmaxf(u * static_cast<float>(width) - 0.5f, 0.0f), static_cast<float>(width - 1));
    const float y = fminf(fmaxf(v * static_cast<float>(height) - 0.5f, 0.0f), static_cast<float>(height - 1));
    const int x0 = static_cast<int>(x), y0 = static_cast<int>(y), x1 = min(x0 + 1, width - 1),
              y1 = min(y0 + 1, height - 1);
    const float part_x = x - static_cast<float>(x0), part_y = y - static_cast<float>(y0);
    const float *const map = reinterpret_cast<const float *>(image.distortion);
    for (int c = 0; c < 2; ++c) {
        const float a = map[(static_cast<int64>(y0) * width + x0) * 2 + c],
                    b = map[(static_cast<int64>(y0) * width + x1) * 2 + c];
        const float e = map[(static_cast<int64>(y1) * width + x0) * 2 + c],
                    f = map[(static_cast<int64>(y1) * width + x1) * 2 + c];
        const float above = a + part_x * (b - a), below = e + part_x * (f - e);
        shift[c] = above + part_y * (below - above);
    }
}

// Find the ray of a pixel in the world's axes, with a direction of length 1, and the length before normalization. t, in
// [0, 1), is the moment of the ray between the opening and the closing of the shutter.
__device__ inline void world_ray(const Image &image, float u, float v, int column, int row, float t, Vector &o,
                                 Vector &d, float &length) {
    bool valid;
    if (image.rays) {
        const float *const given =
            reinterpret_cast<const float *>(image.rays) + (static_cast<int64>(row) * image.width + column) * 6;
        o = {given[0], given[1], given[2]};
        d = {given[3], given[4], given[5]};
        valid = fabsf(o.x) + fabsf(o.y) + fabsf(o.z) < 1e30f;
    } else {
        valid = lens_ray(image, u, v, o, d);
        if (image.distortion) {
            float shift[2];
            distortion_at(image, u, v, shift);
            d.x = d.x + shift[0];
            d.y = d.y + shift[1];
        }
    }
    valid = valid && normalize(d, length);
    if (valid && image.rays && !image.rays_in_camera) return;
    if (!valid) o = {0.0f, 0.0f, 0.0f}, d = {0.0f, 0.0f, 1.0f}, length = 1.0f;
    const float *const s = image.shutter, *const r = image.rotation;
    const float when = s[0] + s[1] * u + s[2] * v + s[3] * t;
    if (image.angle != 0.0f) {  // slerp: a rotation about a fixed axis of the camera
        float sine, cosine;
        sine_cosine(image.angle * when, sine, cosine);
        const Vector a = {image.axis[0], image.axis[1], image.axis[2]};
        const float versine = 1.0f - cosine;
        Vector *const both[2] = {&o, &d};
        for (int n = 0; n < 2; ++n) {
            const Vector w = *both[n];
            const float along = (a.x * w.x + a.y * w.y + a.z * w.z) * versine;
            *both[n] = {w.x * cosine + (a.y * w.z - a.z * w.y) * sine + a.x * along,
                        w.y * cosine + (a.z * w.x - a.x * w.z) * sine + a.y * along,
                        w.z * cosine + (a.x * w.y - a.y * w.x) * sine + a.z * along};
        }
    }
    const Vector p = o, q = d;
    o = {r[0] * p.x + r[1] * p.y + r[2] * p.z + (image.translation[0] + when * image.motion[0]),
         r[3] * p.x + r[4] * p.y + r[5] * p.z + (image.translation[1] + when * image.motion[1]),
         r[6] * p.x + r[7] * p.y + r[8] * p.z + (image.translation[2] + when * image.motion[2])};
    d = {r[0] * q.x + r[1] * q.y + r[2] * q.z, r[3] * q.x + r[4] * q.y + r[5] * q.z,
         r[6] * q.x + r[7] * q.y + r[8] * q.z};
}
