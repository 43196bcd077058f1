"""Stands in for an srun with pyxis: SRUN ARGUMENTS. An image is a folder, into which each task changes its root.

The image has this system's programs and the Python that runs this, and of nobody's files only what is mounted. It has a
PATH of its own.
"""

import os
import sys

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", sys.base_prefix)
ENTER = """
set -eu
image=$1 mounts=$2 path=$3
shift 3
mount --make-rprivate /
for each in $mounts; do
    mkdir -p "$image${each##*:}"
    mount --rbind "${each%%:*}" "$image${each##*:}"
done
exec chroot "$image" /usr/bin/env -C / PATH="$path" "$@"
"""

srun, *arguments = sys.argv[1:]
if arguments == ["--help"]:
    print("  --container-image= --container-mounts=", flush=True)
split = next((number for number, word in enumerate(arguments) if not word.startswith("--")), len(arguments))
options, command = arguments[:split], arguments[split:]
given = dict(word.removeprefix("--container-").split("=", 1) for word in options if word.startswith("--container-"))
options = [word for word in options if not word.startswith("--container-")]
if given:
    mounts = [f"{each}:{each}" for each in SYSTEM if os.path.isdir(each)] + given.get("mounts", "").split(",")
    path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
    enter = ["unshare", "--mount", "sh", "-c", ENTER, "sh", given["image"], " ".join(mounts), path]
    command = [*enter, *command]
os.execv(srun, [srun, *options, *command])
