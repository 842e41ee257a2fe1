package place

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mapShared is memory that the race detector does not watch: readers and writers of bytes meet there on purpose where a
// plugin is careless.
func mapShared(t testing.TB, n int64) Memory {
	t.Helper()
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	m, err := Map(b)
	require.NoError(t, err)
	return m
}

// torture is both ends at work on threads of their own. The plugin is one goroutine at a time, as its lane is.
type torture struct {
	g      Geometry
	host   *Host
	mu     sync.Mutex // the plugin's lane
	plugin *Plugin
}

const tortureKeys = 12

// TestTorture: readers, writers and evictions on real threads. Whatever Release lets pass is what was saved under that key,
// and no slot is lost.
func TestTorture(t *testing.T) {
	g := Geometry{Slots: 6, SlotBytes: 8 << 10}
	x := &torture{g: g}
	arena, words := mapShared(t, g.ArenaBytes()), mapShared(t, g.WordsBytes())
	var err error
	x.host, err = NewHost(arena, words, g)
	require.NoError(t, err)
	o, err := x.host.Reopen()
	require.NoError(t, err)
	x.plugin, err = Open(arena, words, g, o, now)
	require.NoError(t, err)

	end := time.Now().Add(300 * time.Millisecond)
	var workers sync.WaitGroup
	var read, saved, wrong [4]int
	for i := range 4 {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(i)))
			for n := 0; n < 200 || time.Now().Before(end); n++ {
				k := byte(1 + r.IntN(tortureKeys))
				if i < 2 {
					ok, same := x.read(k)
					read[i] += count(ok)
					wrong[i] += count(ok && !same)
				} else {
					saved[i] += count(x.save(t, k, r.IntN(3) == 0))
				}
			}
		})
	}
	workers.Wait()
	t.Logf("%d read, %d saved", read[0]+read[1], saved[2]+saved[3])
	require.Zero(t, wrong)
	require.Positive(t, saved[2]+saved[3])
	x.plugin.Settle()
	for _, s := range x.plugin.Resident() {
		x.plugin.Retire(s)
	}
	require.Zero(t, x.plugin.Sweep())
	require.Equal(t, Counts{Free: g.Slots}, x.plugin.Counts())
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func tortureParts(k byte) []Part { return []Part{{Key: key(k), Length: 8 << 10}} }

func (x *torture) read(k byte) (ok, same bool) {
	refs, err := x.host.Find(keysOf(tortureParts(k)), now)
	if err != nil {
		return false, false
	}
	pin, err := x.host.Pin(refs[0])
	if err != nil {
		return false, false
	}
	got := bytes.Clone(pin.Bytes())
	if pin.Release(now) != nil {
		return false, false
	}
	return true, bytes.Count(got, []byte{k}) == len(got)
}

// save saves a block, for which the plugin gives up another if it has to.
func (x *torture) save(t *testing.T, k byte, replace bool) bool {
	s, err := x.host.Reserve(tortureParts(k), 0, replace)
	if errors.Is(err, ErrSaving) {
		return false
	}
	x.mu.Lock()
	a := x.plugin.Lend(s.Request(), 0)
	if a.Verdict == Declined {
		if all := x.plugin.Resident(); len(all) > 0 {
			x.plugin.Retire(all[int(k)%len(all)])
		}
		a = x.plugin.Lend(s.Request(), 0)
	}
	x.mu.Unlock()
	if v, err := s.Accept(&a, now); err != nil || v == Known {
		if refusal, ok := errors.AsType[*RefusalError](err); ok {
			assert.Equal(t, Pinned, refusal.Reason)
		}
		if r, told := s.Drop(); told {
			x.mu.Lock()
			x.plugin.Returned(r)
			x.mu.Unlock()
		}
		return false
	}
	fill(s.Bytes(0), k)
	done, err := s.Publish(0)
	assert.NoError(t, err)
	return done
}
