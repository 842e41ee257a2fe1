package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// Either side of a connector with Scope engine may refuse to open on a read-only disk, if it says why; a panic or a hang there is a fault.
func TestOpeningOnAReadOnlyDisk(t *testing.T) {
	for text, c := range map[string]struct {
		err  error
		want Status
	}{
		"the system's error":    {fmt.Errorf("open: %w", syscall.EROFS), Skip},
		"the text of a library": {errors.New("IO error: Read-only file system"), Skip},
		"an incompatible disk":  {fmt.Errorf("dir: cannot be written: %w", connector.ErrIncompatible), Skip},
		"a panic":               {fmt.Errorf("open: read-only file system: %w", sdk.ErrPanic), Fail},
		"a hang":                {fmt.Errorf("open: %w", context.DeadlineExceeded), Fail},
		"another error":         {errors.New("segment 3 is missing"), Fail},
	} {
		scheduler, worker := keeper(&values{}, true), keeper(&values{}, true)
		scheduler.Scheduler = func(context.Context, connector.Env, json.RawMessage) (connector.Scheduler, error) { return nil, c.err }
		worker.Worker = func(context.Context, connector.Env, json.RawMessage) (connector.Worker, error) { return nil, c.err }
		for side, plugin := range map[string]connector.Plugin{"scheduler": scheduler, "worker": worker} {
			body := func(c T, h Harness) {
				r := newRig(c, h)
				defer r.close()
				e := r.closed(setup{})
				e.onReadOnly(e.keys(1))
			}
			r := checkCase(t.Context(), Case{ID: "case", Run: body}, InProcess(plugin, nil), settings{deadline: time.Minute})
			require.Equal(t, c.want, r.Status, "%s of the %s side: %v", text, side, r.Log)
			require.Equal(t, c.want == Skip, r.excused, text)
			require.Contains(t, strings.Join(r.Log, "\n"), c.err.Error())
		}
	}
}
