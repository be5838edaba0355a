#!/usr/bin/env bats
# install_nvidia_fs.sh on pretended servers, with trapped package managers.
load helpers

setup() {
    common_setup
    use_tree
    rm -r "$TREE/proc/driver/nvidia-fs"
    INSTALL=$SETUP_DIR/install_nvidia_fs.sh
    # --yes calls a pretended package manager, or a trap.
    export GDS_SYSROOT_PRETENDED=yes
}
teardown() { common_teardown; }

offer() {
    mkdir -p "$TREE/var/lib/apt/lists"
    printf 'Package: other\nVersion: 9.9\n\nPackage: nvidia-fs-dkms\nArchitecture: amd64\nVersion: %s\nDescription: x\n\nPackage: zzz\nVersion: 99.0\n' "$1" >"$TREE/var/lib/apt/lists/cuda_Packages"
}

secure_boot() {
    mkdir -p "$TREE/sys/firmware/efi/efivars"
    printf "\\6\\0\\0\\0\\$1" >"$TREE/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
}

# From here on, one trap is a package manager that notes what it is asked for.
working_manager() {
    printf '#!/bin/sh\nprintf "%%s %%s\\n" "${0##*/}" "$*" >>"%s"\nexit %s\n' "$BOX/asked" "${2:-0}" >"$BOX/manager"
    chmod +x "$BOX/manager"
    ln -f "$BOX/manager" "$BOX/trap/$1"
}

@test "Ubuntu's nvidia flavour: the signed package, even under Secure Boot" {
    change kernel release=6.17.0-1014-nvidia
    secure_boot 1
    run "$INSTALL"
    exits 0
    says 'way:          distribution-package'
    says 'sudo apt-get install -y linux-modules-nvidia-fs-6.17.0-1014-nvidia'
    says 'Secure Boot:  on'
}

@test "another flavour whose signed package the lists offer" {
    mkdir -p "$TREE/var/lib/apt/lists"
    echo 'Package: linux-modules-nvidia-fs-6.17.0-14-generic' >"$TREE/var/lib/apt/lists/noble_Packages"
    run "$INSTALL" --plan
    exits 0
    says 'distribution-package'
}

@test "nvidia-fs 2.29 from the package lists" {
    offer 2.29.1-1
    run "$INSTALL"
    exits 0
    says 'way:          nvidia-package: nvidia-fs 2.29.1'
    says 'sudo apt-get install -y nvidia-fs-dkms'
}

@test "nvidia-fs 2.28.4: as it is on 6.17, mended on 7.0" {
    offer 2.28.4-1
    run "$INSTALL"
    exits 0
    says 'nvidia-package: nvidia-fs 2.28.4'
    change kernel release=7.0.0-5-generic
    run "$INSTALL"
    exits 0
    says 'patched-source'
    says 'nvfs_kernel7_patch.sh --apply --src /usr/src/nvidia-fs-2.28.4'
    says 'sudo dkms install --force nvidia-fs/2.28.4'
}

@test "source trees: 2.29 before 2.28.4, by nvfs-vers.h" {
    change kernel release=7.0.0-5-generic
    python3 "$BATS_TEST_DIRNAME/fakesource.py" "$TREE/usr/src/nvidia-fs-2.28.4"
    run "$INSTALL"
    exits 0
    says 'patched-source'
    python3 "$BATS_TEST_DIRNAME/fakesource.py" "$TREE/usr/src/nvidia-fs-2.30/src" 2.30.2
    run "$INSTALL"
    exits 0
    says 'nvidia-fs 2.30.2, whose source is in /usr/src/nvidia-fs-2.30/src'
    says 'sudo dkms install nvidia-fs/2.30'
}

@test "NVIDIA's repository is configured, its lists are not here" {
    mkdir -p "$TREE/etc/apt/sources.list.d"
    echo 'deb [signed-by=/k] https://repository.example/compute/cuda/repos/ubuntu2404/x86_64/ /' >"$TREE/etc/apt/sources.list.d/cuda.list"
    run "$INSTALL"
    exits 0
    says 'nvidia-fs 2.29 or later'
}

# Does the plan count NVIDIA's repository as configured? The other way it is refused.
counted() {
    run "$INSTALL"
    exits 0
    says 'nvidia-fs 2.29 or later'
}

not_counted() {
    run "$INSTALL"
    exits 3
    says 'no package list and no source tree offers nvidia-fs'
}

URI=https://repository.example/compute/cuda/repos/ubuntu2404/x86_64/

@test "apt's one-line sources: only those that are switched on count" {
    local apt=$TREE/etc/apt line
    mkdir -p "$apt/sources.list.d"
    for line in "# deb $URI /" "#deb $URI /" "deb-src $URI /" "deb https://other.example/ / # $URI" "# $URI"; do
        printf 'deb https://other.example noble main\n%s\n' "$line" | tee "$apt/sources.list" >"$apt/sources.list.d/cuda.list"
        not_counted
    done
    # Names that apt does not read.
    for line in cuda.list.disabled cuda.list.save cuda.sources.disabled cuda; do
        rm -f "$apt"/sources.list "$apt"/sources.list.d/*
        echo "deb $URI /" >"$apt/sources.list.d/$line"
        not_counted
    done
    for line in "deb $URI /" "  deb	[arch=amd64 signed-by=/k] $URI / # on" "deb [ trusted=yes ]$URI /"; do
        printf '# deb %s /\n%s' "$URI" "$line" >"$apt/sources.list"
        counted
    done
}

@test "apt's deb822 sources: Enabled, Types, comments, several stanzas and lines" {
    local file=$TREE/etc/apt/sources.list.d/cuda.sources
    mkdir -p "${file%/*}"
    local off="Types: deb\nURIs: $URI\nSuites: /\n"
    for line in "${off}Enabled: no" "Enabled: No\n$off" "${off}Enabled:false" "${off}enabled:\t0" \
        "Types: deb-src\nURIs: $URI" "#Types: deb\n#URIs: $URI" "Types: deb\n# URIs: $URI\nURIs: https://other.example" \
        "${off}Enabled: no\n\nTypes: deb\nURIs: https://other.example"; do
        printf "$line\n" >"$file"
        not_counted
    done
    for line in "$off" "${off}Enabled: yes" "Types: deb-src deb\nURIs: $URI" "Types: deb\r\nURIs: $URI\r" \
        "${off}Enabled: no\n \n$off" "Types: deb\nURIs: https://other.example\n#\n $URI" \
        "Types:\n deb\nURIs:\n $URI\n"; do
        printf "$line" >"$file"
        counted
    done
}

@test "repositories of dnf and zypper: enabled=0, comments, other sections and names" {
    change distribution ident=rocky version=9.6 'name=Rocky Linux 9.6' 'like=rhel centos fedora'
    local folder=$TREE/etc/yum.repos.d again
    for again in dnf zypper; do
        mkdir -p "$folder"
        for line in "[cuda]\nbaseurl=$URI\nenabled=0" "[cuda]\nenabled = False\nbaseurl = $URI" "[cuda]\n#baseurl=$URI" \
            "[a]\nbaseurl=$URI\nenabled=0\n[b]\nbaseurl=https://other.example\nenabled=1" "; baseurl=$URI" \
            "[cuda]\nname=$URI"; do
            printf "$line\n" >"$folder/cuda.repo"
            not_counted
        done
        printf "[cuda]\nbaseurl=$URI\n" >"$folder/cuda.repo.disabled"
        not_counted
        for line in "[cuda]\nbaseurl=$URI" "[cuda]\nbaseurl=https://other.example\n  $URI\nenabled=1" \
            "[b]\nenabled=0\n[cuda]\nbaseurl=$URI"; do
            printf "$line\n" >"$folder/cuda.repo"
            counted
        done
        # What another distribution's package manager reads does not count here.
        change distribution ident=sles version=15.7 name=SLES like=suse
        [[ $again == zypper ]] || not_counted
        folder=$TREE/etc/zypp/repos.d
    done
}

@test "package lists that apt keeps compressed" {
    local list=$TREE/var/lib/apt/lists/cuda_Packages kind
    for kind in gz xz lzma lz4 zst bz2; do
        offer 2.29.1-1
        echo 'Package: linux-modules-nvidia-fs-6.17.0-14-generic' >"${list%/*}/noble_Packages"
        # Longer than a pipe holds, so that a search that ends early leaves its writer with SIGPIPE.
        seq 100000 >>"${list%/*}/noble_Packages"
        for file in "$list" "${list%/*}/noble_Packages"; do
            case $kind in
                gz) gzip "$file" ;;
                xz) xz "$file" ;;
                lzma) xz --format=lzma "$file" ;;
                lz4) lz4 -q --rm "$file" "$file.lz4" ;;
                zst) zstd -q --rm "$file" ;;
                bz2) bzip2 "$file" ;;
            esac
        done
        run "$INSTALL"
        exits 0
        says 'distribution-package'
        rm "${list%/*}"/noble_*
        run "$INSTALL"
        exits 0
        says 'nvidia-package: nvidia-fs 2.29.1'
        rm "$list".*
    done
    echo garbage >"$list.gz"
    run "$INSTALL"
    exits 3
}

@test "a compressed list that nothing here unpacks is named" {
    offer 2.29.1-1
    gzip "$TREE/var/lib/apt/lists/cuda_Packages"
    # A machine without gzip and without apt's own helper.
    sed 's#^APT_HELPER=.*#APT_HELPER=/none#; s#gzip -dcq#no-such-gzip -dcq#' "$INSTALL" >"$BOX/install.sh"
    cp "$SETUP_DIR/lib.sh" "$BOX"
    run bash "$BOX/install.sh"
    exits 3
    says 'note: the package list cuda_Packages.gz cannot be read: no-such-gzip is not here to unpack it'
    sed 's#gzip -dcq#no-such-gzip -dcq#' "$INSTALL" >"$BOX/install.sh"
    if [ -x /usr/lib/apt/apt-helper ]; then
        run bash "$BOX/install.sh"
        exits 0
        says 'nvidia-fs 2.29.1'
    fi
}

@test "a list of NVIDIA's repository that is switched off now offers nothing" {
    offer 2.29.1-1
    mv "$TREE/var/lib/apt/lists/cuda_Packages" "$TREE/var/lib/apt/lists/repository.example_compute_cuda_repos_ubuntu2404_x86%5f64_Packages"
    mkdir -p "$TREE/etc/apt"
    echo "# deb $URI /" >"$TREE/etc/apt/sources.list"
    not_counted
    says 'is left from a repository that is not configured now'
    echo "deb $URI /" >"$TREE/etc/apt/sources.list"
    run "$INSTALL"
    exits 0
    says 'nvidia-fs 2.29.1'
}

@test "RHEL and SLES take their own package managers" {
    mkdir -p "$TREE/etc/yum.repos.d" "$TREE/etc/zypp/repos.d"
    echo baseurl=https://repository.example/compute/cuda/repos/rhel9/x86_64 >"$TREE/etc/yum.repos.d/cuda.repo"
    cp "$TREE/etc/yum.repos.d/cuda.repo" "$TREE/etc/zypp/repos.d"
    change distribution ident=rocky version=9.6 'name=Rocky Linux 9.6' 'like=rhel centos fedora'
    run "$INSTALL"
    exits 0
    says 'sudo dnf install -y nvidia-fs-dkms'
    change distribution ident=sles version=15.7 name=SLES like=suse
    run "$INSTALL"
    exits 0
    says 'sudo zypper --non-interactive install nvidia-fs-dkms'
}

@test "refused: no driver, proprietary driver, no headers, no distribution, WSL, nothing offered" {
    offer 2.29.1-1
    change driver kind=proprietary
    run "$INSTALL"
    exits 3
    says 'is the proprietary one'
    does_not_say 'Read these'
    rm -r "$TREE/proc/driver"
    run "$INSTALL"
    exits 3
    says 'no NVIDIA driver is loaded'
    change driver
    rm -r "$TREE/lib"
    run "$INSTALL"
    exits 3
    says 'sudo apt-get install linux-headers-6.17.0-14-generic'
    change kernel
    rm "$TREE/etc/os-release"
    run "$INSTALL"
    exits 3
    says 'distribution'
    change distribution ident=plan9 like=none
    run "$INSTALL"
    exits 3
    change distribution
    echo 6.6.87-microsoft-standard-WSL2 >"$TREE/proc/sys/kernel/osrelease"
    run "$INSTALL"
    exits 3
    says 'Subsystem'
    change kernel
    rm -r "$TREE/var"
    run "$INSTALL"
    exits 3
    says 'CUDA repository'
    rm "$TREE/proc/sys/kernel/osrelease"
    run "$INSTALL"
    exits 3
    says 'kernel release cannot be read'
}

@test "Secure Boot: a module built here needs a key" {
    offer 2.29.1-1
    secure_boot 1
    run "$INSTALL"
    exits 3
    says 'no key to sign'
    mkdir -p "$TREE/var/lib/shim-signed/mok"
    : >"$TREE/var/lib/shim-signed/mok/MOK.der"
    run "$INSTALL"
    exits 0
    says 'DKMS signs with /var/lib/shim-signed/mok/MOK.der'
    secure_boot 0
    run "$INSTALL"
    exits 0
    says 'Secure Boot:  off'
    rm -r "$TREE/sys/firmware/efi/efivars"
    run "$INSTALL"
    exits 0
    says 'Secure Boot:  unknown'
}

@test "nvidia-fs is loaded already: nothing to do" {
    change nvidia_fs
    run "$INSTALL" --yes
    exits 0
    says 'loaded already (2.29)'
}

@test "a kernel without the nvme hook is pointed out" {
    offer 2.29.1-1
    change kallsyms hook=false
    run "$INSTALL"
    exits 0
    says 'has no hook for nvidia-fs'
}

@test "--yes for the tree of another machine is refused; this machine is not that one" {
    offer 2.29.1-1
    working_manager apt-get
    GDS_SYSROOT_PRETENDED='' run "$INSTALL" --yes
    one_clear_line
    says "'$TREE'"
    [ ! -e "$BOX/asked" ]
    GDS_SYSROOT_PRETENDED='' run "$INSTALL" --yes --dry-run
    exits 0
}

@test "--yes runs the package manager's commands and no other" {
    offer 2.29.1-1
    working_manager apt-get
    run "$INSTALL" --yes
    exits 0
    [ "$(cat "$BOX/asked")" = $'apt-get update\napt-get install -y nvidia-fs-dkms' ]
    says 'sudo modprobe nvidia-fs'
}

@test "--yes for dnf" {
    mkdir -p "$TREE/etc/yum.repos.d"
    echo baseurl=https://repository.example/compute/cuda/repos/rhel9/x86_64 >"$TREE/etc/yum.repos.d/cuda.repo"
    change distribution ident=rocky like=rhel
    working_manager dnf
    run "$INSTALL" --yes
    exits 0
    [ "$(cat "$BOX/asked")" = 'dnf install -y nvidia-fs-dkms' ]
}

@test "--yes on a plan without packages runs nothing" {
    change kernel release=7.0.0-5-generic
    python3 "$BATS_TEST_DIRNAME/fakesource.py" "$TREE/usr/src/nvidia-fs-2.28.4"
    run "$INSTALL" --yes
    exits 0
    says 'the package manager has nothing to do'
}

@test "--yes: the package manager fails" {
    offer 2.29.1-1
    working_manager apt-get 100
    run "$INSTALL" --yes
    exits 1
    says "'apt-get update' failed"
    [ "$(wc -l <"$BOX/asked")" -eq 1 ]
}

@test "--yes on a refused plan, and --yes --dry-run, run nothing" {
    offer 2.29.1-1
    run "$INSTALL" --yes --dry-run
    exits 0
    says 'would run: apt-get install -y nvidia-fs-dkms'
    change driver kind=proprietary
    run "$INSTALL" --yes
    exits 3
}

@test "--json" {
    offer 2.29.1-1
    change distribution 'name=My "own" Ubuntu'
    run "$INSTALL" --json
    exits 0
    python3 -c '
import json, sys
r = json.load(sys.stdin)
assert r["way"] == "nvidia-package" and r["distribution"] == "My \"own\" Ubuntu" and r["exit_code"] == 0
assert r["package_commands"] == ["apt-get update", "apt-get install -y nvidia-fs-dkms"], r' <<<"$output"
    change driver kind=proprietary
    run "$INSTALL" --json
    exits 3
    python3 -c 'import json, sys; r = json.load(sys.stdin); assert r["exit_code"] == 3 and len(r["refused"]) == len(r["mends"]) == 1, r' <<<"$output"
}

@test "it changes nothing, and wrong usage is one line" {
    offer 2.29.1-1
    before=$(fingerprint "$TREE")
    run "$INSTALL"
    run "$INSTALL" --json
    [ "$before" = "$(fingerprint "$TREE")" ]
    run "$INSTALL" --plan --yes
    one_clear_line
    run "$INSTALL" nonsense
    one_clear_line
    says "'nonsense'"
    GDS_SYSROOT=$BOX/none run "$INSTALL"
    one_clear_line
    run "$INSTALL" --help
    exits 0
    says '3 refused'
}
