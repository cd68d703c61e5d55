# One image for every kind of cluster: docker build --target cpu -t airmoe-ray:0.4.0-cpu .   (or cuda)
# PyPI's torch for Linux is a CUDA build. Target cpu refuses it: give PyTorch's index of CPU wheels, as its own installation
# page names it, with --build-arg PIP_EXTRA_INDEX_URL=…
# Nodes join one another only with the same Ray and the same Python, to the patch level: constraints.txt has the one, this
# tag the other. A release adds the tag's digest (…@sha256:…), so that images of two days are the same.
ARG BASE=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS wheel
COPY constraints.txt pyproject.toml README.md LICENSE /src/
# what is needed, apart from the project itself: a layer of its own, which a changed line of code leaves as it is
RUN mkdir /needs && cp /src/constraints.txt /needs/ \
 && python -c "import tomllib; p = tomllib.load(open('/src/pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['aws'], sep='\n')" > /needs/requirements.txt
COPY airmoe_ray /src/airmoe_ray
COPY actors /src/actors
COPY api /src/api
COPY configs /src/configs
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /src/constraints.txt setuptools \
 && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist /src

# hadolint ignore=DL3006
FROM ${BASE} AS base
# Rsync, ssh and ps are called by `ray up`, wget by KubeRay's health checks. The folders are where cluster files mount into:
# an engine makes missing ones as root, and the user below could not write beside what is mounted.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends hostname openssh-client procps rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 --shell /bin/bash airmoe \
 && install -d -o 1000 -g 1000 /home/airmoe/.ray /home/airmoe/airmoe /home/airmoe/airmoe/run
# `ray up` asks the image for its home, and takes /root where it says nothing
ENV HOME=/home/airmoe
COPY --from=wheel /needs /needs

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /needs/constraints.txt torch torchvision \
 && python -c "import sys, torch; sys.exit(torch.version.cuda and f'torch {torch.__version__} is a CUDA build: give PyTorch\'s index of CPU wheels with --build-arg PIP_EXTRA_INDEX_URL=…, or build target cuda')"
RUN pip install --no-cache-dir --constraint /needs/constraints.txt --requirement /needs/requirements.txt
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl
USER 1000
WORKDIR /home/airmoe
# all that is written: the rest of the file system may be read-only (docker run --read-only)
VOLUME ["/home/airmoe", "/tmp"]
EXPOSE 8000
CMD ["airmoe", "--help"]

FROM base AS cuda
# what the NVIDIA runtime of the host brings into the container
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /needs/constraints.txt torch torchvision \
 && pip install --no-cache-dir --constraint /needs/constraints.txt --requirement /needs/requirements.txt
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl
USER 1000
WORKDIR /home/airmoe
VOLUME ["/home/airmoe", "/tmp"]
EXPOSE 8000
CMD ["airmoe", "--help"]
