"""Stock vLLM for pdhub: prefill instances and decode pools. Importing this never imports vllm."""
