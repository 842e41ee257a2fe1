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

// nowhere is a network of one listener, on which nobody can be reached.
type nowhere struct {
	pipe.Network
	pipe.Listener
}

func (nowhere) Dial(context.Context, string) (pipe.Link, error) {
	return pipe.Link{}, connector.ErrGone
}

func (nowhere) Address() string { return "here" }
func (nowhere) Close() error    { return nil }

// A block that could not be stored does not count as sent: a later try that stores it sends it.
func TestPushSavedSendsWhatIsStored(t *testing.T) {
	s := newStore(pipe.Peers{Network: nowhere{}, Bytes: 1 << 10, Patience: time.Minute, Wait: time.Minute, Push: func(connector.RequestID) string { return "there" }}, nil, slog.New(slog.DiscardHandler))
	s.listener = nowhere{}
	defer func() { require.NoError(t, s.Close()) }()
	w := &Worker{side{peers: s}}
	save := &connector.Transfer{Request: "r", Blocks: []connector.Block{{Key: connector.BlockKey{1}}, {Key: connector.BlockKey{2}, ID: 1}}}
	keys := w.keys(save.Blocks, 0, 1)
	require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: keys[0], Spans: [][]byte{{1}}}}))
	w.PushSaved(t.Context(), save)
	require.Equal(t, keys[1:], s.pushing.add("r", keys))
}

// A consumer subscribes once: a save that is under way compares its address.
func TestSubscribesOnce(t *testing.T) {
	s := newStore(pipe.Peers{}, nil, nil)
	defer func() { require.NoError(t, s.Close()) }()
	consumer := &subscriber{}
	require.NoError(t, s.answer(consumer, &message{kind: kindSubscribe, from: "a"}))
	push := s.beginPush("")
	require.ErrorIs(t, s.answer(consumer, &message{kind: kindSubscribe, from: "another"}), connector.ErrIncompatible)
	require.Equal(t, consumer, push.reached("a"))
	require.Nil(t, push.reached("another"))
}
