# trl-qurl on vLLM's own image, whose torch and vLLM it keeps: docker build --tag trl-qurl .
# For drivers below 580 add --build-arg CUDA=-cu129. More: docs/installation.md. Not built or run on a GPU yet.
ARG VLLM_VERSION=0.32.0
ARG CUDA=
FROM vllm/vllm-openai:v${VLLM_VERSION}${CUDA}

# Again, because what stands before FROM ends there.
ARG VLLM_VERSION

WORKDIR /opt/trl-qurl
COPY . .
# The image has its packages in the system's Python, and uv to add to them. Naming vLLM's version keeps the image's build.
RUN uv pip install --system --no-cache "vllm==${VLLM_VERSION}" ".[math,eval,report,peft]"

# Runs are written here; mount a directory.
WORKDIR /workspace
ENTRYPOINT ["trl-qurl"]
CMD ["--help"]
