package acceptance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// act is something that a client of the mixed load does.
type act struct {
	name   string
	weight int // how often it is picked, of all weights
	do     func(m *mix, rng *rand.Rand, s *spot) (happened bool, err error)
}

func acts() []act {
	return []act{
		{"answers compared", 900, complete},
		{"requests left", 40, leave},
		{"caches reset", 5, reset},
		{"plugins killed", 10, func(m *mix, rng *rand.Rand, s *spot) (bool, error) { return signalPlugin(m, rng, s, syscall.SIGKILL) }},
		{"plugins stopped", 2, func(m *mix, rng *rand.Rand, s *spot) (bool, error) { return signalPlugin(m, rng, s, syscall.SIGSTOP) }},
		{"stored files damaged", 25, damageFile},
		{"values of the server damaged", 10, damageValue},
		{"tickets forged, replayed or old", 30, showTickets},
	}
}

// pick picks one by weight.
func pick(rng *rand.Rand) act {
	all, total := acts(), 0
	for _, a := range all {
		total += a.weight
	}
	at := rng.IntN(total)
	for _, a := range all {
		if at -= a.weight; at < 0 {
			return a
		}
	}
	return all[0]
}

// patience is how long a request of the mixed load may take before it counts as lost.
const patience = 2 * time.Minute

// complete asks for a prompt and compares the answer.
func complete(m *mix, rng *rand.Rand, s *spot) (bool, error) {
	ctx, cancel := context.WithTimeout(m.Context(), patience)
	defer cancel()
	return m.ask(ctx, rng, s)
}

// leave goes away, often before the answer is there.
func leave(m *mix, rng *rand.Rand, s *spot) (bool, error) {
	ctx, cancel := context.WithTimeout(m.Context(), time.Duration(rng.IntN(40))*time.Millisecond)
	defer cancel()
	answered, err := m.ask(ctx, rng, s)
	if errors.Is(err, context.DeadlineExceeded) {
		return true, nil
	}
	return !answered && err == nil, err
}

func (m *mix) ask(ctx context.Context, rng *rand.Rand, s *spot) (bool, error) {
	i := rng.IntN(len(s.prompts))
	q := cluster.Request{Prompt: s.prompts[i], MaxTokens: m.Tokens, IgnoreEOS: true, Salt: mixedSalts[rng.IntN(len(mixedSalts))]}
	got, err := m.Client.Complete(ctx, s.front.URL, q)
	if err != nil {
		return false, err
	}
	return true, m.same(s, i, got.Tokens)
}

// same compares the tokens of an answer.
func (m *mix) same(s *spot, prompt int, got []int32) error {
	if want := s.want[prompt].Tokens; !slices.Equal(want, got) {
		return fmt.Errorf("prompt %d of %d bytes: tokens %v, those of a single node are %v", prompt, len(s.prompts[prompt]), got, want)
	}
	m.count("tokens compared", len(got))
	return nil
}

// reset empties the caches of an engine; not every connector can.
func reset(m *mix, rng *rand.Rand, s *spot) (bool, error) {
	engine := []*cluster.Process{s.p, s.d}[rng.IntN(2)]
	req, err := http.NewRequestWithContext(m.Context(), http.MethodPost, engine.URL+"/reset_prefix_cache", http.NoBody)
	if err != nil {
		return false, err
	}
	resp, err := m.Client.HTTP.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode == http.StatusOK, err
}

// signalPlugin sends a signal to a plugin that is not left alone, and waits until it is gone.
func signalPlugin(m *mix, rng *rand.Rand, s *spot, signal syscall.Signal) (bool, error) {
	if s.alone {
		return false, nil
	}
	engine := []*cluster.Process{s.p, s.d}[rng.IntN(2)]
	h, err := m.Client.Health(m.Context(), engine.URL)
	if err != nil {
		return false, err
	}
	leaves := h.Connector.Leaves()
	plugin := leaves[rng.IntN(len(leaves))]
	if plugin.State != "ready" || syscall.Kill(plugin.PID, signal) != nil {
		return false, nil // another client was faster
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(time.Minute); cluster.Alive(plugin.PID); <-tick.C {
		if time.Now().After(until) {
			return false, fmt.Errorf("plugin %d lives on after %v", plugin.PID, signal)
		}
	}
	return true, nil
}

// damageFile changes a byte in a file that the connector has stored.
func damageFile(_ *mix, rng *rand.Rand, s *spot) (bool, error) {
	var files []string
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the connector moves its files meanwhile
		}
		return err
	})
	if err != nil || len(files) == 0 {
		return false, err
	}
	f, err := os.OpenFile(files[rng.IntN(len(files))], os.O_RDWR, 0)
	if err != nil {
		return false, ignore(err, fs.ErrNotExist)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	at, one := rng.Int64N(info.Size()), make([]byte, 1)
	if _, err := f.ReadAt(one, at); err != nil {
		return false, ignore(err, io.EOF)
	}
	one[0] ^= 1 << rng.IntN(8)
	_, err = f.WriteAt(one, at)
	return err == nil, err
}

// ignore is err, unless it is what may well happen.
func ignore(err, fine error) error {
	if errors.Is(err, fine) {
		return nil
	}
	return err
}

// damageValue changes a byte in something that a connector has stored in the server.
func damageValue(m *mix, rng *rand.Rand, _ *spot) (bool, error) {
	client := m.redis.redis.Client()
	defer client.Close()
	key, err := client.RandomKey(m.Context()).Result()
	if err != nil {
		return false, nil // the server is empty
	}
	size, err := client.StrLen(m.Context(), key).Result()
	if err != nil || size == 0 {
		return false, nil // not a value of bytes, or gone
	}
	at := rng.Int64N(size)
	old, err := client.GetRange(m.Context(), key, at, at).Bytes()
	if err != nil || len(old) == 0 {
		return false, err
	}
	return true, client.SetRange(m.Context(), key, at, string([]byte{old[0] ^ 1<<rng.IntN(8)})).Err()
}

// showTickets has a decode engine see tickets that are wrong in some way, and the right one between them.
func showTickets(m *mix, rng *rand.Rand, s *spot) (bool, error) {
	if !s.Peers {
		return false, nil
	}
	i := rng.IntN(len(s.prompts))
	good, err := m.TakeTicket(s.p, s.prompts[i])
	if err != nil || len(good) == 0 {
		return false, err
	}
	_, wrong := wrongTicket(rng, good, s.old, m.strange(s))
	for _, ticket := range [][]byte{wrong, good, good} {
		got, err := m.ShowTicket(s.d, s.prompts[i], ticket)
		if err == nil {
			err = m.same(s, i, got)
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// strange is a ticket of another connector's engine.
func (m *mix) strange(s *spot) []byte {
	i := slices.IndexFunc(m.spots, func(o *spot) bool { return o != s && o.Peers })
	if i < 0 {
		return s.old
	}
	return m.spots[i].old
}
