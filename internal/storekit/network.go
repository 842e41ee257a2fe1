package storekit

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// networks are file systems that machines share, by the number that statfs gives. A FUSE file system may be one of
// them (sshfs, GlusterFS, object stores) or not, which statfs does not say.
func networks() map[uint32]string {
	return map[uint32]string{
		unix.NFS_SUPER_MAGIC: "NFS", unix.SMB_SUPER_MAGIC: "SMB", unix.CIFS_SUPER_MAGIC: "SMB", unix.SMB2_SUPER_MAGIC: "SMB",
		unix.CEPH_SUPER_MAGIC: "CephFS", unix.AFS_SUPER_MAGIC: "AFS", unix.AFS_FS_MAGIC: "AFS", unix.CODA_SUPER_MAGIC: "Coda",
		unix.OCFS2_SUPER_MAGIC: "OCFS2", unix.V9FS_MAGIC: "9p", unix.FUSE_SUPER_MAGIC: "FUSE",
		0x0bd00bd0: "Lustre", 0x01161970: "GFS2", 0x47504653: "GPFS", 0x19830326: "BeeGFS", 0x20030528: "OrangeFS", 0xaad7aaea: "PanFS",
	}
}

// NetworkFolder names the kind of file system of a folder if machines may share it; empty if none do. The folder need
// not be there yet: then its nearest parent counts.
func NetworkFolder(path string, statfs func(path string, st *unix.Statfs_t) error) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return ""
	}
	for {
		var st unix.Statfs_t
		err := statfs(path, &st)
		if err == nil {
			if name, is := networks()[uint32(st.Type)]; is {
				return fmt.Sprintf("a network file system (%s)", name)
			}
			return ""
		}
		parent := filepath.Dir(path)
		if !errors.Is(err, unix.ENOENT) || parent == path {
			return ""
		}
		path = parent
	}
}
