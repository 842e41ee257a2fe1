package host

import (
	"bytes"
	"fmt"
	"os"

	"github.com/kvport/kvport/host/internal/config"
)

// maxSecret bounds a tenant secret's file, in bytes.
const maxSecret = 64 << 10

// OpenFile opens a regular file for reading. Whatever else has the path is an error, and opening it
// does not wait: a FIFO may never get a writer. The caller closes the file.
func OpenFile(path string) (*os.File, error) { return config.OpenFile(path) }

// ReadFile reads a regular file of at most limit bytes. The caller owns the slice.
func ReadFile(path string, limit int64) ([]byte, error) { return config.ReadFile(path, limit) }

// TenantSecret reads kvport.tenant_secret_file; nil if none is set. White space around the secret
// does not belong to it, so that an editor's newline makes no other tenant. The caller owns the
// slice. Errors wrap ErrConfig.
func (s *Settings) TenantSecret() ([]byte, error) {
	if s.TenantSecretFile == "" {
		return nil, nil
	}
	secret, err := config.ReadFile(s.TenantSecretFile, maxSecret)
	if secret = bytes.TrimSpace(secret); err == nil && len(secret) == 0 {
		err = fmt.Errorf("%s is empty", s.TenantSecretFile)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: kvport.tenant_secret_file: %w", ErrConfig, err)
	}
	return secret, nil
}
