package storekit

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestNetworkFolder: the nearest folder that is there says whether machines share a file system.
func TestNetworkFolder(t *testing.T) {
	mounts := map[string]int64{"/": 0xef53, "/nfs": unix.NFS_SUPER_MAGIC, "/cifs": unix.CIFS_SUPER_MAGIC, "/fuse": unix.FUSE_SUPER_MAGIC, "/nfs/tmp": unix.TMPFS_MAGIC}
	statfs := func(path string, st *unix.Statfs_t) error {
		kind, is := mounts[path]
		if path == "/locked" {
			return unix.EACCES
		}
		if !is {
			return unix.ENOENT
		}
		st.Type = kind
		return nil
	}
	for path, want := range map[string]string{
		"/var/kv": "", "/nfs": "a network file system (NFS)", "/nfs/a/b": "a network file system (NFS)", "/cifs/x": "a network file system (SMB)",
		"/fuse": "a network file system (FUSE)", "/nfs/tmp/x": "", "/locked/x": "", "/nfs/../var": "",
	} {
		require.Equal(t, want, NetworkFolder(path, statfs), path)
	}
	require.Empty(t, NetworkFolder(t.TempDir()+"/not/there", unix.Statfs))
}
