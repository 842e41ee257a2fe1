package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Pages are hidden for a while if the store cannot be believed, and until they are stored again a put replaces them.
func TestDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, ks := newDoubt(time.Minute), hashes("a", 5)
		require.True(t, d.certain(ks))
		require.Equal(t, 5, d.before(ks))
		d.learn(ks[:2], ks[3:], true)
		d.learn(nil, ks[2:3], false)
		require.False(t, d.certain(ks))
		require.True(t, d.certain(ks[:2]))
		require.Equal(t, 3, d.before(ks), "the third is doubtful, and not hidden")
		d.learn(nil, ks, false)
		require.Equal(t, 3, d.before(ks), "a put has failed")
		<-time.After(time.Minute)
		require.Equal(t, 5, d.before(ks))
		require.True(t, d.any(ks))
		d.learn(ks, nil, false)
		require.False(t, d.any(ks))
		require.True(t, d.certain(ks))
	})
}

// More pages than are remembered: nothing is certain any more.
func TestDoubtOverflows(t *testing.T) {
	d := newDoubt(time.Minute)
	var k connector.BlockKey
	for i := range maxDoubtful + 1 {
		k[0], k[1], k[2], k[3] = 1, byte(i), byte(i>>8), byte(i>>16)
		d.learn(nil, []connector.BlockKey{k}, true)
	}
	require.False(t, d.certain(hashes("a", 1)))
	require.True(t, d.any([]connector.BlockKey{k}))
	require.Len(t, d.pages, 1)
}

// spoil makes pages of package host's test connector unreadable: each is there, and reading it fails in a way that says
// nothing about its content.
func spoil(t *testing.T, dir string, n int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.0"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(files), n)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "folder"), 0o700))
	for _, path := range files[:n] {
		require.NoError(t, os.Remove(path))
		require.NoError(t, os.Symlink("folder", path))
	}
}

// A page that is there and cannot be read is not found any more, and its next put replaces it.
func TestPagesUnreadable(t *testing.T) {
	dir := t.TempDir()
	p := attachPager(t, open(t, faulty(dir, "", 1), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	spoil(t, dir, 1)
	n, _ := p.exists(hs)
	require.Equal(t, 10, n)
	results := p.get(hs, 0)
	at := -1
	for i, r := range results {
		if r != pageDone {
			require.Equal(t, -1, at, "one page is unreadable: %v", results)
			at = i
		}
	}
	require.GreaterOrEqual(t, at, 0)
	n, _ = p.exists(hs)
	require.Equal(t, at, n)
	require.Equal(t, all(10-at, pageDone), p.put(hs[at:], 20))
	n, _ = p.exists(hs)
	require.Equal(t, 10, n)
	require.Equal(t, all(10, pageDone), p.get(hs, 0))
}

// Somebody else may have stored a page again.
func TestPagesAreBelievedAgain(t *testing.T) {
	dir := t.TempDir()
	p := attachPager(t, open(t, faulty(dir, "", 1), func(l *limits) { l.doubt = time.Second }).socket, pagesAt())
	hs := hashes("a", 3)
	require.Equal(t, all(3, pageDone), p.put(hs, 0))
	spoil(t, dir, 3)
	require.Equal(t, all(3, pageFailed), p.get(hs, 0))
	require.Eventually(t, func() bool {
		n, _ := p.exists(hs)
		return n == 3
	}, time.Minute, 10*time.Millisecond)
}

// What a load brings after its call was given up counts: pages that did not come are hidden, and stored again.
func TestPagesLateFailure(t *testing.T) {
	dir := t.TempDir()
	p := attachPager(t, open(t, fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both",
		"kv_connector_extra_config": {"dir": %q, "fault": "wait_load", "at": 1, "once": true},
		"kvport": {"heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "save": "5m", "transfer": "5m"}}}`, dir), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	n, _ := p.exists(hs)
	require.Equal(t, 10, n)
	require.Equal(t, all(10, pageLate), p.done(p.begin(true, hs, 0, 300*time.Millisecond)))
	require.Eventually(t, func() bool {
		n, _ := p.exists(hs)
		return n == 0
	}, time.Minute, 10*time.Millisecond)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	p.counts("kvport_agent_pages_copied_bytes_total", float64(20*pagesAt().Bytes()))
	n, _ = p.exists(hs)
	require.Equal(t, 10, n)
	require.Equal(t, all(10, pageDone), p.get(hs, 0))
}
