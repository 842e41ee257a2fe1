package sharedstorage

import (
	"fmt"
	"path/filepath"

	"github.com/kvport/kvport/connector"
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
	Path     string `json:"shared_storage_path" jsonschema:"required,minLength=1,description=Folder that holds the blocks; made when it is missing. Several engines may use one."`
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
	case c.Path == "":
		return bad("shared_storage_path", "is missing, set it to a folder")
	case !filepath.IsAbs(c.Path):
		return bad("shared_storage_path", "is %q, want an absolute path", c.Path)
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
