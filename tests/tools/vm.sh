#!/bin/bash
# Runs a command under another kernel: one of Debian's, in a virtual machine (qemu without KVM, so everything is slow).
#
#   vm.sh SUITE COMMAND [ARGUMENT...]    bullseye (5.10), bookworm (6.1), trixie (6.12) or sid
#
# The machine sees this one's files, read-only; what it writes is lost at its end. It has control groups of version 2 alone, a
# /run of its own, loopback, and no other network. Prints the console; the exit status is the command's, 125 where there is none.
# The environment variables named in VM_ENV are handed on. VM_MEMORY (2048) is in MiB, VM_LIMIT (600) in seconds, VM_CPUS is 1.
# VM_APPEND has more words for the kernel's command line, VM_MONITOR is where qemu's monitor listens (QMP, a unix socket).
# VM_SYSTEMD=1: process 1 is the systemd of SUITE, which runs the command as a unit, among the files of a small installation of
# SUITE. This machine's files are in /machine then, and the folder of the command is the same below that.
#
# Needs root, Debian's qemu-system-x86, busybox-static, cpio, kmod and xz-utils, for VM_SYSTEMD also debootstrap. Kernels and
# installations stay in VM_CACHE (/var/tmp/vm-kernels).
set -euo pipefail
suite=${1:?} cache=${VM_CACHE:-/var/tmp/vm-kernels}
shift
(($#)) || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }
kernel=$cache/$suite work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)

if [[ ! -e $kernel/vmlinuz ]]; then
  mkdir -p "$work/parts" "$work/lists/partial" "$kernel"
  chmod 755 "$work"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nTrusted: yes\n' "$mirror" "$suite" >"$work/parts/suite.sources"
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts" -o "Dir::State::Lists=$work/lists"
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  image=$(apt-cache "${options[@]}" depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }' | tr -d '<>')
  (cd "$work" && apt-get "${options[@]}" download "$image" && dpkg -x ./linux-image-*.deb "$kernel/x")
  mv "$kernel"/x/boot/vmlinuz-* "$kernel/vmlinuz"
fi

files=/ place=$PWD shares=()
if [[ ${VM_SYSTEMD-} ]]; then
  files=$cache/root-$suite place=/machine$PWD
  if [[ ! -d $files ]]; then
    rm -rf "$files.new"
    debootstrap --variant=minbase --include=systemd,dbus,iproute2,iputils-ping,jq,kmod,procps "$suite" "$files.new" "$mirror" >"$work/made" ||
      { cat "$work/made" "$files.new/debootstrap/debootstrap.log"; exit 125; } >&2
    mv "$files.new" "$files"
  fi
  shares=(-virtfs "local,path=/,mount_tag=machine,security_model=none,readonly=on,multidevs=remap")
fi

modules=$(find "$kernel/x" -type d -path '*/lib/modules/*' -prune | head -n 1)
version=${modules##*/} root=$work/root
# The part of the initial file system that is the same each time.
parts=(net fs/9p fs/netfs fs/fscache fs/overlayfs lib crypto drivers/net drivers/virtio drivers/block arch/x86/crypto)
common=$kernel/initrd-$(cksum <<<"${parts[*]}" | cut -d' ' -f1)
if [[ ! -e $common ]]; then
  mkdir -p "$root"/{bin,proc,sys,dev,host,new,over} "$root/lib/modules/$version/kernel"
  cp /bin/busybox "$root/bin/"
  for part in "${parts[@]}"; do
    [[ ! -d $modules/kernel/$part ]] || (cd "$modules/kernel" && cp -r --parents "$part" "$root/lib/modules/$version/kernel")
  done
  rm -rf "$root/lib/modules/$version/kernel/drivers/net"/{ethernet,wireless}
  cp "$modules"/modules.{builtin,builtin.modinfo,order} "$root/lib/modules/$version/"
  find "$root/lib/modules" -name '*.xz' -exec xz -d {} +
  PATH=$PATH:/usr/sbin:/sbin depmod -b "$root" "$version"
  (cd "$root" && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$common.new"
  mv "$common.new" "$common"
  rm -rf "$root"
fi
mkdir "$root"
{
  printf 'cd %q\n' "$place"
  for name in PATH ${VM_ENV-}; do printf 'export %s=%q\n' "$name" "${!name}"; done
  printf '%q ' "$@"
} >"$root/command"
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mkdir -p /bin && /bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev
for module in virtio_pci 9pnet_virtio 9p overlay; do modprobe $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose host /host || echo "vm: this kernel does not mount our files"
mount -t tmpfs over /over && mkdir -p /over/upper/lib /over/work
# Debian's /lib is a link to /usr/lib.
mkdir -p /over/upper/usr/lib/modules && cp -r /lib/modules/* /over/upper/usr/lib/modules/ && rmdir /over/upper/lib
mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work over /new
cp /command /new/command
case $(cat /sys/bus/virtio/drivers/9pnet_virtio/virtio*/mount_tag) in *machine*)
  mkdir -p /new/machine && mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose machine /new/machine
  cat >/new/etc/systemd/system/vm.service <<'UNIT'
[Unit]
Description=what the machine is for
[Service]
Type=oneshot
ExecStart=/bin/bash /vm
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
TimeoutStartSec=infinity
UNIT
  cat >/new/vm <<'VM'
echo "vm: $(uname -r), systemd $(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p')"
bash /command
echo "vm: rc $?"
echo o >/proc/sysrq-trigger
sleep 60
VM
  # Nobody logs in.
  for unit in getty@tty1 serial-getty@ttyS0 systemd-firstboot; do ln -sf /dev/null "/new/etc/systemd/system/$unit.service"; done
  mkdir -p /new/etc/systemd/system/multi-user.target.wants
  ln -s ../vm.service /new/etc/systemd/system/multi-user.target.wants/vm.service
  ln -sf /lib/systemd/system/multi-user.target /new/etc/systemd/system/default.target
  : >/new/etc/machine-id
  umount /proc /sys /dev
  exec switch_root /new /lib/systemd/systemd --show-status=0 ;;
esac
cat >/new/start <<'START'
for place in "proc proc /proc" "sysfs sys /sys" "devtmpfs dev /dev" "tmpfs run /run" "cgroup2 groups /sys/fs/cgroup"; do
  set -- $place
  mount -t "$1" "$2" "$3"
done
ln -s /proc/self/fd /dev/fd
mkdir -p /dev/pts /dev/shm /run/netns /run/lock && mount -t devpts pts /dev/pts && mount -t tmpfs shm /dev/shm
for module in tun veth bridge nf_tables; do modprobe "$module"; done
[ -e /dev/net/tun ] || { mkdir -p /dev/net && mknod /dev/net/tun c 10 200; }
ip link set lo up
echo "vm: $(uname -r)"
bash /command
echo "vm: rc $?"
echo o >/proc/sysrq-trigger
sleep 60
START
umount /proc /sys /dev
exec switch_root /new /bin/bash /start
INIT
chmod +x "$root/init"
(cat "$common" && cd "$root" && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initrd"
timeout "${VM_LIMIT:-600}" qemu-system-x86_64 -accel tcg -cpu max -m "${VM_MEMORY:-2048}" -smp "${VM_CPUS:-1}" -nographic -no-reboot -nic none \
  -virtfs "local,path=$files,mount_tag=host,security_model=none,readonly=on,multidevs=remap" "${shares[@]}" \
  ${VM_MONITOR:+-qmp "unix:$VM_MONITOR,server=on,wait=off"} \
  -kernel "$kernel/vmlinuz" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1 no_timer_check rdinit=/init ${VM_APPEND-}" </dev/null |
  sed -u 's/\r//g; s/\x1b\[[0-9;?]*[a-zA-Z]//g; s/\x1bc//g' | tee "$work/log"
status=$(sed -n 's/^vm: rc \([0-9]*\).*/\1/p' "$work/log" | tail -n 1)
exit "${status:-125}"
