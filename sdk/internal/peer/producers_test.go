package peer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// town is a network: whose address begins with good is reached, at once or a little later, with deaf does not answer, and all others refuse.
type town struct{ pipe.Network }

func (town) Dial(ctx context.Context, address string) (pipe.Link, error) {
	switch {
	case strings.HasPrefix(address, "good"):
		if strings.HasPrefix(address, "good-new") {
			<-time.After(time.Millisecond)
		}
		p := &silent{over: make(chan struct{})}
		return pipe.Link{Out: p, In: p}, nil
	case strings.HasPrefix(address, "deaf"):
		<-ctx.Done()
		return pipe.Link{}, ctx.Err()
	}
	return pipe.Link{}, connector.ErrGone
}

// silent is a pipe that takes everything and says nothing.
type silent struct {
	end  sync.Once
	over chan struct{}
}

func (*silent) Send(context.Context, []byte, [][]byte) error { return nil }

func (p *silent) Recv(ctx context.Context, _ pipe.Place) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-p.over:
		return io.EOF
	}
}

func (p *silent) Close() error {
	p.end.Do(func() { close(p.over) })
	return nil
}

// inTown runs a test with a store, in a time of its own.
func inTown(t *testing.T, test func(t *testing.T, s *Store, log *bytes.Buffer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s := newStore(pipe.Peers{Network: town{}, Bytes: 1 << 10, Wait: time.Second, Patience: time.Minute, Await: true}, nil, slog.New(slog.NewTextHandler(&log, nil)))
		defer func() { require.NoError(t, s.Close()) }()
		test(t, s, &log)
	})
}

// seek asks a producer for a block.
func (s *Store) seek(t *testing.T, address string) *producer {
	t.Helper()
	p := s.producer(address)
	require.NotNil(t, p, address)
	p.ask([]connector.StoreKey{{1}})
	return p
}

// remembers counts the producers that a store remembers whose addresses begin as is said.
func (s *Store) remembers(prefix string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for address := range s.producers {
		if strings.HasPrefix(address, prefix) {
			n++
		}
	}
	return n
}

// remembered is the producer that a store remembers for an address, nil if none. What runs when the time passes may forget one meanwhile.
func (s *Store) remembered(address string) *producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.producers[address]
}

// TestFloodOfProducers: whoever names any number of addresses at which there is nobody, or somebody who says nothing, takes no room from those
// who answer, neither from known ones nor from new ones, and does not fill the log. After a while nothing is left of it.
func TestFloodOfProducers(t *testing.T) {
	for _, kind := range []string{"dead", "deaf"} {
		t.Run(kind, func(t *testing.T) {
			inTown(t, func(t *testing.T, s *Store, log *bytes.Buffer) {
				var known []*producer
				const late = 5
				for i := range maxProducers - late {
					known = append(known, s.seek(t, fmt.Sprint("good-", i)))
					synctest.Wait()
				}
				for i := range 1000 {
					s.seek(t, fmt.Sprint(kind, "-", i))
					require.LessOrEqual(t, s.remembers(kind), maxStrangers)
				}
				for i := range late { // amid more of them
					p := s.seek(t, fmt.Sprint("good-new-", i))
					for j := range maxStrangers - 1 {
						s.seek(t, fmt.Sprint(kind, "-more-", i, "-", j))
					}
					synctest.Wait()
					require.Same(t, p, s.seek(t, p.address))
					<-time.After(10 * time.Millisecond)
					synctest.Wait()
					require.False(t, p.need().stranger)
					known = append(known, p)
				}
				for _, p := range known {
					require.Same(t, p, s.remembered(p.address), p.address)
				}
				<-time.After(40 * time.Second)
				synctest.Wait()
				require.Zero(t, s.remembers(kind), "nobody is remembered who is not there")
				require.Equal(t, len(known), s.remembers("good"))
				require.LessOrEqual(t, strings.Count(log.String(), "cannot be reached"), warnMost)
				require.NotContains(t, log.String(), "too many producers")
			})
		})
	}
}

// TestProducersInUse: those in use are kept, and the log has a few lines about those that find no room. Of those that are not in use the one goes
// first that was used least recently.
func TestProducersInUse(t *testing.T) {
	inTown(t, func(t *testing.T, s *Store, log *bytes.Buffer) {
		for i := range maxProducers {
			s.seek(t, fmt.Sprint("good-", i))
			synctest.Wait()
		}
		for i := range 1000 {
			require.Nil(t, s.producer(fmt.Sprint("good-new-", i)))
		}
		require.Equal(t, warnMost, strings.Count(log.String(), "too many producers are in use"))
		idle := func(address string) {
			p := s.remembered(address)
			p.mu.Lock()
			p.quiet = time.Time{} // it has answered
			p.mu.Unlock()
		}
		idle("good-9")
		idle("good-7")
		s.seek(t, "good-new")
		<-time.After(10 * time.Millisecond)
		synctest.Wait()
		require.Nil(t, s.remembered("good-7"))
		require.NotNil(t, s.remembered("good-9"))
		require.NotNil(t, s.remembered("good-new"))
		require.Equal(t, maxProducers, s.remembers("good"))
		<-time.After(warnEvery - time.Second)
		require.NotNil(t, s.remembered("good-9"), "who has a link stays")
	})
}

// TestForgottenProducer: nobody waits for what was to be sent to a producer that has to go, and nothing more is sent there.
func TestForgottenProducer(t *testing.T) {
	inTown(t, func(t *testing.T, s *Store, _ *bytes.Buffer) {
		began := time.Now()
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			s.push(t.Context(), "deaf", &message{kind: kindPush, keys: make([]connector.StoreKey, 3)})
		}()
		synctest.Wait()
		p := s.remembered("deaf")
		require.True(t, p.enqueue(&message{kind: kindPush, keys: make([]connector.StoreKey, 4)}), "it waits behind the other")
		for i := range maxStrangers {
			s.seek(t, fmt.Sprint("deaf-", i))
		}
		<-sent
		synctest.Wait()
		require.Less(t, time.Since(began), time.Second, "before anybody lost patience")
		require.EqualValues(t, 7, s.counts.pushFailed.Load())
		require.False(t, p.enqueue(&message{}))
		waits, gone := p.ask([]connector.StoreKey{{1}})
		require.True(t, waits, "another try finds another client")
		require.Empty(t, gone)
	})
}
