# An image with linumpy for the workflow and for servers: docker build --build-arg EXTRA=cuda12 --tag linumpy .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN LINUMPY_NATIVE=require pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
# cuda13, cuda12, or nothing for the CPU; further extras by commas.
ARG EXTRA=cuda13
# The core opens the libraries of the decoders at run time; Nextflow measures its tasks by ps.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libzstd1 liblz4-1 zlib1g procps \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRA:+[$EXTRA]}" \
    && linum --version
# Compiled kernels, for every user, also those without a home in the image: mount a volume here to keep them.
ENV LINUMPY_KERNEL_CACHE=/cache MPLCONFIGDIR=/cache/matplotlib
RUN mkdir --mode=1777 /cache /cache/cupy /cache/warp /cache/matplotlib
VOLUME /cache
WORKDIR /work
CMD ["linum", "--help"]
