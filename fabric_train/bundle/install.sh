#!/usr/bin/env bash
# Install Fabric Train from this folder, without internet:  ./install.sh [FOLDER FOR THE VIRTUAL ENVIRONMENT]
# Compare the hash of this file with the one that the bundle's summary named; this file checks all others.
set -euo pipefail

python_version=@PYTHON@
machine=@MACHINE@
source=@SOURCE@
checksums_sha256=@CHECKSUMS_SHA256@
num_files=@NUM_FILES@
installed_bytes=@INSTALLED_BYTES@

fail() {
  echo "error: $1" >&2
  exit "${2:-2}"
}

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=$(realpath -m -- "${1:-$bundle/.venv}")
cd "$bundle"

echo "[1/4] comparing $num_files files with SHA256SUMS"
LC_ALL=C sha256sum --check --status <<< "$checksums_sha256  SHA256SUMS" 2> /dev/null \
  || fail "SHA256SUMS is damaged or missing; copy the bundle again"
checked=0 damaged='' missing=''
while IFS= read -r line; do
  case $line in
    *': FAILED open or read') missing+=" ${line%': FAILED open or read'}" ;;
    *': FAILED') damaged+=" ${line%': FAILED'}" ;;
  esac
  checked=$((checked + 1))
  if [[ -t 1 ]]; then printf '\r      %d of %d' "$checked" "$num_files"; fi
done < <(LC_ALL=C sha256sum --check SHA256SUMS 2> /dev/null || true)
if [[ -t 1 ]]; then echo; fi
if [[ -n $damaged$missing ]]; then
  fail "${damaged:+damaged:$damaged; }${missing:+missing:$missing; }copy the bundle again"
fi

echo "[2/4] creating $environment with Python $python_version"
[[ $(uname -m) == "$machine" ]] || fail "the wheels are for $machine, and this machine is $(uname -m); make another bundle"
python=''
for candidate in "python$python_version" python3 python; do
  found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true)
  if [[ $found == "$python_version" ]]; then
    python=$candidate
    break
  fi
done
[[ -n $python ]] || fail "there is no Python $python_version here; install it, or make a bundle with --python VERSION"
if [[ -e $environment && ! -e $environment/pyvenv.cfg ]]; then
  fail "$environment exists and is no virtual environment; name another folder: ./install.sh FOLDER"
fi
parent=$environment
while [[ ! -e $parent ]]; do parent=$(dirname "$parent"); done
free=$(($(df --output=avail -k "$parent" | tail -n 1) * 1024))
if ((free < installed_bytes)); then
  fail "$environment takes $((installed_bytes / 1000000)) MB, and there are $((free / 1000000)) MB left; name another folder"
fi
"$python" -m venv --without-pip "$environment" || fail "$python cannot create $environment" 1

echo "[3/4] installing $(find wheels -name '*.whl' | wc -l) packages, $((installed_bytes / 1000000)) MB (a few minutes)"
export PYTHONWARNINGS=ignore PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
offline=(--quiet --no-index --find-links wheels)
pip_wheel=(wheels/pip-*.whl) # Python runs a zip file
"$environment/bin/python" "${pip_wheel[0]}/pip" install "${offline[@]}" pip setuptools || fail 'pip cannot be installed' 1
"$environment/bin/python" -m pip install "${offline[@]}" --no-build-isolation --editable "$source" \
  || fail 'pip cannot install the wheels; its lines above say why' 1

echo '[4/4] importing the installed packages'
"$environment/bin/python" -c \
  'import datasets, lightning, torch, transformers, fabric_train; print("      torch", torch.__version__, "with", torch.cuda.device_count(), "GPUs")' \
  || fail 'the packages cannot be imported; the lines above say why' 1

printf 'done. This trains; --devices N takes fewer GPUs, and train.yaml has the other arguments:\n'
printf '  cd %q && HF_HUB_OFFLINE=1 %q -m fabric_train --config train.yaml\n' "$bundle" "$environment/bin/python"
