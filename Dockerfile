# syntax-free on purpose: the frontend that comes with BuildKit 0.12 and newer is enough, so nothing is pulled but the base.
#
# One file for every variant; what differs stands in pinned/<CUDA>/. `./inv build` proves what comes out before it tags it.
# No nvidia/cuda base: the wheels bring CUDA, cuDNN and NCCL, a second copy only gets in their way, and those images are
# deleted after their end of life.
#
# The digest stands in docker-library/repo-info. Another base: --build-arg KIT_BASE=... (Debian bookworm, or what has its
# python3.11 and apt).
ARG KIT_BASE=debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
ARG CUDA


FROM ${KIT_BASE} AS base
ARG CUDA
LABEL kit.variant="${CUDA:?is not set: build with --build-arg CUDA=VARIANT, a folder of pinned/}"
# Only packages.txt decides what this layer holds beyond Python; each stage mounts the one file that it reads, so that a
# change elsewhere in pinned/ leaves it cached. Lists, caches (ldconfig's aux-cache too) and logs lie on tmpfs: they hold
# times and never reach the image, nor do Debian's .pyc files.
# The secrets are optional: `ca` is a bundle of certificate authorities, `apt` a sources.list of the user's own mirror.
RUN --mount=type=bind,source=pinned/${CUDA}/packages.txt,target=/tmp/packages.txt \
    --mount=type=secret,id=ca,target=/tmp/ca.crt \
    --mount=type=secret,id=apt,target=/tmp/apt.list \
    --mount=type=tmpfs,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/cache \
    --mount=type=tmpfs,target=/var/log \
    set -eux; \
    export DEBIAN_FRONTEND=noninteractive PYTHONDONTWRITEBYTECODE=1; \
    apt() { \
        set -- "$@" -y -q --no-install-recommends -o Acquire::Retries=3; \
        if [ -s /tmp/ca.crt ]; then set -- "$@" -o Acquire::https::CAInfo=/tmp/ca.crt; fi; \
        if [ -s /tmp/apt.list ]; then set -- "$@" -o Dir::Etc::SourceList=/tmp/apt.list -o Dir::Etc::SourceParts=/dev/null; fi; \
        apt-get "$@"; \
    }; \
    apt update; \
    apt install ca-certificates python3 python3-venv $(sed 's/#.*//' /tmp/packages.txt); \
    find /usr -name '*.pyc' -delete; \
    rm -rf /var/lib/dpkg/*-old /etc/ld.so.cache~


FROM base AS environment
ARG CUDA
# pip comes from a throw-away environment, so that /opt/venv holds what the lock says and nothing else: nobody can swap
# torch inside by accident. Only the lock decides what this layer holds: code comes later.
# Wheels are kept as files and not in pip's cache of answers: an index that forbids caching would fill that one in vain.
# The secret `pip` is the user's own pip configuration (index, proxy), optional; its values reach no layer and no history.
RUN --mount=type=bind,source=pinned/${CUDA}/requirements.txt,target=/tmp/requirements.txt \
    --mount=type=secret,id=ca,target=/tmp/ca.crt \
    --mount=type=secret,id=pip,target=/tmp/pip.conf \
    --mount=type=cache,target=/tmp/wheels,id=kit-wheels,sharing=shared \
    --mount=type=tmpfs,target=/tmp/pip \
    set -eux; \
    if [ -s /tmp/ca.crt ]; then export PIP_CERT=/tmp/ca.crt; fi; \
    export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1; \
    if [ -s /tmp/pip.conf ]; then export PIP_CONFIG_FILE=/tmp/pip.conf; fi; \
    python3 -m venv /tmp/pip/venv; \
    python3 -m venv --without-pip /opt/venv; \
    set -- --no-cache-dir --progress-bar off --no-deps --only-binary :all: --require-hashes -r /tmp/requirements.txt; \
    /tmp/pip/venv/bin/pip --python /opt/venv/bin/python download "$@" --find-links /tmp/wheels --dest /tmp/wheels; \
    /tmp/pip/venv/bin/pip --python /opt/venv/bin/python install "$@" --find-links /tmp/wheels --no-index --no-compile; \
    python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv


FROM environment AS app
ARG CUDA
LABEL org.opencontainers.image.title="bert-kit" \
      org.opencontainers.image.description="Pinned multi-GPU PyTorch environment and a BERT trainer" \
      org.opencontainers.image.licenses="MIT"
# PYTHONSAFEPATH: a file in the caller's folder named like a package must not shadow it.
# HOME, USER, LOGNAME: a uid without a passwd entry has none, and torch's compile cache asks for a name.
# NVIDIA_*: inert without the NVIDIA runtime; with it they ask for all GPUs and for CUDA, which `utility` alone would not give.
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONPATH=/opt/kit \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp USER=kit LOGNAME=kit \
    HF_HOME=/cache/huggingface \
    KIT_CACHE=/cache/kit \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KIT_VARIANT=${CUDA}
# Any uid may write its caches: a fresh named volume inherits the mode of the folder that it covers.
RUN set -eux; \
    groupadd --gid 1000 kit; \
    useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp --shell /bin/bash --no-log-init kit; \
    rm -f /etc/*- ; \
    mkdir -m 1777 /cache; \
    mkdir -m 0755 /work
COPY pyproject.toml /opt/kit/
COPY pinned /opt/kit/pinned
COPY tests /opt/kit/tests
COPY app /opt/kit/app
# Readable for every uid, however strict the umask of the checkout.
RUN chmod -R u=rwX,go=rX /opt/kit
# For the record of a run: there is no git in here.
ARG KIT_REVISION
ENV KIT_REVISION=${KIT_REVISION}
USER 1000:1000
WORKDIR /work
CMD ["python", "-m", "app.train", "--help"]
