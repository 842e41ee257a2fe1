package sdk

import (
	"context"
	"fmt"
	"io"
)

// Shared keeps handles of what a process can open only once, such as a database that locks its file (bbolt, RocksDB, LevelDB, SQLite in
// exclusive mode). It is for whoever opens the same file several times in one process: [FromStore] opens a Store for each epoch of an
// engine and each config, and sides of an engine's last life may still be open when the next one opens (rule LIFE-03); with [FromSides]
// each side opens for itself. Processes it does not help: what they share needs a database with a server.
//
// The zero value is ready to use. A plugin has one for each kind of handle, made beside its Definition. Calls may run at the same time.
type Shared[T io.Closer] struct{ handles handles[string, T] }

// Open gives the handle of a name, such as the clean path of a file: that which open makes, or the one that is open already. While
// others open or close it, Open waits, and one that is closing is opened again. release gives the handle back; it may be called again, and
// does nothing then. The last one that gives it back closes it, and gets the error of that.
//
// The error is that of open, or of ctx. What has failed is not kept: the next Open tries again, and so does one that has waited, if open failed
// only because the context of another caller has ended.
func (s *Shared[T]) Open(ctx context.Context, name string, open func(ctx context.Context) (T, error)) (handle T, release func() error, err error) {
	return s.handles.acquire(ctx, name, open, func(h T) error {
		if err := h.Close(); err != nil {
			return fmt.Errorf("close %s: %w", name, err)
		}
		return nil
	})
}
