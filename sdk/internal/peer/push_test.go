package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// dials answers dials with errors, in order, and ends the store after the last.
type dials struct {
	pipe.Network
	errs []error
	end  context.CancelFunc
}

func (d *dials) Dial(context.Context, string) (pipe.Link, error) {
	err := d.errs[0]
	if d.errs = d.errs[1:]; len(d.errs) == 0 {
		d.end()
	}
	return pipe.Link{}, err
}

// A producer that first has no room and then refuses us is warned of twice: only the second says what to mend.
func TestSubscriptionSaysThatItIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reset, refused := errors.New("connection reset by peer"), fmt.Errorf("another key: %w", connector.ErrIncompatible)
		ctx, cancel := context.WithCancel(t.Context())
		var log bytes.Buffer
		network := &dials{errs: []error{reset, reset, refused, refused, reset, refused, reset}, end: cancel}
		s := &Store{peers: pipe.Peers{Network: network, Wait: time.Second}, log: slog.New(slog.NewTextHandler(&log, nil)), ctx: ctx}
		(&subscription{store: s, address: "a"}).run()
		require.Equal(t, 2, bytes.Count(log.Bytes(), []byte("layers do not arrive")), log.String())
		require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("another key")), log.String())
	})
}
