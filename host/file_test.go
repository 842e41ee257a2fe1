package host

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestReadFileRefuses has paths that are no regular file: none may block.
func TestReadFileRefuses(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, unix.Mkfifo("fifo", 0o600))
	l, err := net.Listen("unix", "socket")
	require.NoError(t, err)
	defer l.Close()
	for _, path := range []string{"fifo", "socket", ".", "/dev/zero"} {
		_, err := ReadFile(path, 10)
		require.ErrorContains(t, err, path+" is not a regular file")
		_, err = (&Settings{TenantSecretFile: path}).TenantSecret()
		require.ErrorContains(t, err, path+" is not a regular file")
		require.ErrorIs(t, err, ErrConfig)
	}
	_, err = ParseConfig("@fifo")
	require.ErrorContains(t, err, "fifo is not a regular file")
}

func TestTenantSecret(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	secret := func(content string) (string, error) {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		got, err := (&Settings{TenantSecretFile: path}).TenantSecret()
		return string(got), err
	}
	for _, content := range []string{"a b", "a b\n", " a b\r\n"} {
		got, err := secret(content)
		require.NoError(t, err)
		require.Equal(t, "a b", got)
	}
	for content, want := range map[string]string{"": "is empty", "\n": "is empty", string(make([]byte, maxSecret+1)): "is larger than"} {
		_, err := secret(content)
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, want)
	}
	none, err := (&Settings{}).TenantSecret()
	require.NoError(t, err)
	require.Nil(t, none)
}
