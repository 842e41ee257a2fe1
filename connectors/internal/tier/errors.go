package tier

import (
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// Why a block was not stored. Put gives them inside a *connector.ItemError.
var (
	// ErrPinned says that every slot is in use at this moment.
	ErrPinned = fmt.Errorf("all slots are pinned: %w", connector.ErrDeclined)
	// ErrThreshold says that the block was not offered often enough yet (Options.StoreThreshold).
	ErrThreshold = fmt.Errorf("below the store threshold: %w", connector.ErrDeclined)
	errFull      = errors.New("the disk is full")
	errAbsent    = errors.New("not stored")
	// ErrQuota is what every *QuotaError is.
	ErrQuota = fmt.Errorf("over quota: %w", connector.ErrDeclined)
)

// QuotaError says that a tenant may not store a block.
type QuotaError struct {
	Tenant      uint64
	Used, Limit int64 // bytes
}

// Error implements error.
func (e *QuotaError) Error() string {
	return fmt.Sprintf("tenant %016x has %d of %d bytes: %v", e.Tenant, e.Used, e.Limit, ErrQuota)
}

// Unwrap makes it ErrQuota.
func (e *QuotaError) Unwrap() error { return ErrQuota }
