package sharedstorage

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// Scope says that every engine which opens the same folder sees the same blocks.
const Scope = connector.ScopeShared

// The defaults and limits of Config.
const (
	DefaultWorkers = 4
	MaxWorkers     = 64
)

// Config is the kv_connector_extra_config of this connector.
type Config struct {
	Path     string `json:"shared_storage_path,omitempty" jsonschema:"description=Folder that holds the blocks; made when it is missing. Several engines may use one. A relative path begins at the engine's working folder; default: kvport/blocks in this user's cache folder."`
	MaxBytes int64  `json:"max_bytes,omitempty" jsonschema:"minimum=0,default=0,description=Size cap in bytes. Blocks that were not used for longest go first. 0: no cap."`
	ReadOnly bool   `json:"read_only,omitempty" jsonschema:"default=false,description=Never write: neither save nor evict nor remove damaged files."`
	Fsync    bool   `json:"fsync,omitempty" jsonschema:"default=false,description=Flush every block to the disk before it becomes visible. Not needed for correctness."`
	Workers  int    `json:"workers,omitempty" jsonschema:"minimum=1,maximum=64,default=4,description=Files read or written at the same time."`
}

// Validate reports the first field that cannot work. Errors wrap connector.ErrIncompatible.
func (c Config) Validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%s %s: %w", field, fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
	switch {
	case c.MaxBytes < 0:
		return bad("max_bytes", "is %d, want 0 (no cap) or more", c.MaxBytes)
	case c.Workers < 0 || c.Workers > MaxWorkers:
		return bad("workers", "is %d, want 1..%d", c.Workers, MaxWorkers)
	}
	return nil
}

// withDefaults fills in what the config leaves out.
func (c Config) withDefaults() Config {
	if c.Workers == 0 {
		c.Workers = DefaultWorkers
	}
	return c
}

// Environment names the variables that say where this user's cache folder is, for the plugin's manifest.
func Environment() []string { return []string{"HOME", "XDG_CACHE_HOME"} }

// Needs names the folder that the plugin writes, for its manifest.
func Needs() connector.Needs { return connector.Needs{Writes: []string{"shared_storage_path"}} }

// settle makes the path absolute, and says where blocks are kept if the config leaves that open. A plugin
// runs in the working folder of the engine that started it.
func (c Config) settle(log *slog.Logger) (Config, error) {
	var err error
	switch {
	case c.Path == "":
		if c.Path, err = ownFolder(); err == nil {
			log.Warn("shared_storage_path is not set: blocks are kept in a folder of this user's own", "path", c.Path)
		}
	case !filepath.IsAbs(c.Path):
		if c.Path, err = filepath.Abs(c.Path); err == nil {
			log.Info("shared_storage_path begins at the engine's working folder", "path", c.Path)
		}
	}
	if err != nil {
		return c, fmt.Errorf("shared_storage_path: %w: %w", err, connector.ErrIncompatible)
	}
	if info, err := os.Stat(c.Path); err == nil && !info.IsDir() {
		return c, fmt.Errorf("shared_storage_path %s is a file, want a folder: %w", c.Path, connector.ErrIncompatible)
	}
	return c.withDefaults(), nil
}

// BeyondMachine implements what sdk.FromStore asks a config: what says that other machines see the blocks. Without a path
// they are in this user's cache folder, which a network file system may have as well.
func (c Config) BeyondMachine() string {
	path := c.Path
	if path == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return ""
		}
		path = filepath.Join(cache, "kvport", "blocks")
	}
	if kind := storekit.NetworkFolder(path, unix.Statfs); kind != "" {
		return fmt.Sprintf("shared_storage_path %s is on %s", path, kind)
	}
	return ""
}

// ownFolder makes a folder that only this user can enter, and checks that nobody else made it.
func ownFolder() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("is not set, and this user has no cache folder: %w", err)
	}
	path := filepath.Join(cache, "kvport", "blocks")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || !ok || int(stat.Uid) != os.Getuid() {
		return "", fmt.Errorf("is not set, and %s is not a folder of this user with mode 0700", path)
	}
	return path, nil
}
