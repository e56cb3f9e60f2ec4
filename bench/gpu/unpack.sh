#!/usr/bin/env bash
# Unpacks parts of the bundle under SITE, then says what to put before PYTHONPATH. `unpack.sh SITE PART…`
set -euo pipefail
site=${1:?usage: unpack.sh SITE PART…}
shift
mkdir -p "$site"
for part in "$@"; do
  for archive in "$part"/*.tar.xz; do
    [ -e "$archive" ] && tar xJf "$archive" -C "$site" &
  done
  if compgen -G "$part/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$part"/*.whl \
      2> >(grep -v -e 'already exists' -e 'root user' >&2)
  fi
  for half in "$part"/model.gguf.*; do
    [ -e "$half" ] && cp "$half" "$site/"
  done
  wait
done
if [ -e "$site/model.gguf.0" ] && [ -e "$site/model.gguf.1" ]; then
  cat "$site/model.gguf.0" "$site/model.gguf.1" >"$site/model.gguf"
fi
root=$(cd "$(dirname "$0")/../.." && pwd)
echo "export PYTHONPATH=$root:$root/engines/vllm/src:$root/engines/transformers/src:$root/engines/tilert/src:$root/plugins/nixl/src:$site"
