package agent

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

const (
	pageTokens = 16
	poolPages  = 64
)

// pageLengths are the segments of a page: of unequal lengths, and none a multiple of anything.
var pageLengths = []int64{300, 1000, 7}

// pager is an engine that stores pages: its pool has all first segments, then all second ones, and so on.
type pager struct {
	*process
	lengths []int64
}

// pagesAt is how an engine describes its pages.
func pagesAt() *wire.AttachPages {
	return &wire.AttachPages{
		Engine: "p", Model: connector.NewFingerprint("model"), Shape: connector.NewFingerprint("shape"), ShapeText: "f32", Hashes: "sglang/sha256",
		Tokens: pageTokens, Lengths: pageLengths, Pages: 8,
	}
}

func attachPagesCall(a *wire.AttachPages) *kvportv1.AgentCall {
	m := &kvportv1.AgentAttachPages{
		Version: wire.AgentVersion, Engine: a.Engine, Model: a.Model[:], Shape: a.Shape[:], ShapeText: a.ShapeText, Hashes: a.Hashes,
		PageTokens: uint32(a.Tokens), Pages: uint32(a.Pages),
	}
	for _, l := range a.Lengths {
		m.Lengths = append(m.Lengths, uint64(l))
	}
	return &kvportv1.AgentCall{Call: &kvportv1.AgentCall_AttachPages{AttachPages: m}}
}

// attachPager attaches an engine that stores pages, with a pool that is not sealed.
func attachPager(t testing.TB, socket string, a *wire.AttachPages) *pager {
	t.Helper()
	p, refusal := tryPager(t, socket, a)
	require.Nil(t, refusal, refusal.GetMessage())
	return p
}

// tryPager attaches such an engine, or says why it was refused.
func tryPager(t testing.TB, socket string, a *wire.AttachPages) (*pager, *kvportv1.Error) {
	t.Helper()
	p := &pager{dial(t, socket), a.Lengths}
	m := p.call(attachPagesCall(a))
	if m.GetError() != nil {
		p.close()
		return nil, m.GetError()
	}
	require.NotZero(t, m.GetAttached().GetLife())
	p.memory(poolPages*a.Bytes(), 0)
	p.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesRegion{PagesRegion: &kvportv1.AgentPagesRegion{Size: uint64(poolPages * a.Bytes())}}}, p.file)
	m = p.answer(p.id)
	require.Nil(t, m.GetError(), m.GetError().GetMessage())
	require.False(t, m.GetPagesMemory().GetSealed())
	return p, nil
}

// offsets are where the segments of a page of the pool begin.
func (p *pager) offsets(page int) []uint64 {
	var out []uint64
	at := int64(0)
	for _, l := range p.lengths {
		out = append(out, uint64(at+int64(page)*l))
		at += poolPages * l
	}
	return out
}

// page is what lies in a page of the pool.
func (p *pager) page(page int) []byte {
	var out []byte
	for i, o := range p.offsets(page) {
		out = append(out, p.mem[o:o+uint64(p.lengths[i])]...)
	}
	return out
}

// write puts what belongs to a key into a page of the pool.
func (p *pager) write(page int, key connector.BlockKey) {
	content := p.content(key)
	for i, o := range p.offsets(page) {
		copy(p.mem[o:o+uint64(p.lengths[i])], content[:p.lengths[i]])
		content = content[p.lengths[i]:]
	}
}

func (p *pager) content(key connector.BlockKey) []byte {
	var out []byte
	for _, l := range p.lengths {
		part := make([]byte, l)
		_, _ = rand.NewChaCha8(key).Read(part)
		out = append(out, part...)
	}
	return out
}

func pack(keys []connector.BlockKey) []byte {
	var out []byte
	for _, k := range keys {
		out = append(out, k[:]...)
	}
	return out
}

// exists asks how many leading pages are stored.
func (p *pager) exists(keys []connector.BlockKey) (n int, late bool) {
	p.t.Helper()
	return p.existsBy(keys, time.Minute)
}

func (p *pager) existsBy(keys []connector.BlockKey, deadline time.Duration) (n int, late bool) {
	p.t.Helper()
	m := p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesExists{PagesExists: &kvportv1.AgentPagesExists{Keys: pack(keys), DeadlineMs: uint32(deadline.Milliseconds())}}})
	require.NotNil(p.t, m.GetPagesFound(), m.GetError().GetMessage())
	return int(m.GetPagesFound().GetPages()), m.GetPagesFound().GetLate()
}

// begin begins a put or a get of pages that lie from first on.
func (p *pager) begin(get bool, keys []connector.BlockKey, first int, deadline time.Duration) (id uint64) {
	p.t.Helper()
	var offsets []uint64
	for i := range keys {
		offsets = append(offsets, p.offsets(first+i)...)
	}
	c := &kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesPut{PagesPut: &kvportv1.AgentPagesPut{Keys: pack(keys), Offsets: offsets, DeadlineMs: uint32(deadline.Milliseconds())}}}
	if get {
		c.Call = &kvportv1.AgentCall_PagesGet{PagesGet: &kvportv1.AgentPagesGet{Keys: pack(keys), Offsets: offsets, DeadlineMs: uint32(deadline.Milliseconds())}}
	}
	p.post(c, nil)
	return p.id
}

func (p *pager) done(id uint64) []kvportv1.AgentPageResult {
	p.t.Helper()
	m := p.answer(id)
	require.NotNil(p.t, m.GetPagesDone(), m.GetError().GetMessage())
	return m.GetPagesDone().GetResults()
}

// put stores pages with what belongs to their keys.
func (p *pager) put(keys []connector.BlockKey, first int) []kvportv1.AgentPageResult {
	p.t.Helper()
	return p.putBy(keys, first, time.Minute)
}

func (p *pager) putBy(keys []connector.BlockKey, first int, deadline time.Duration) []kvportv1.AgentPageResult {
	p.t.Helper()
	for i, k := range keys {
		p.write(first+i, k)
	}
	return p.done(p.begin(false, keys, first, deadline))
}

// get loads pages into blank memory. It makes sure that memory has changed where the result is done, and nowhere
// else, and that it is what belongs there.
func (p *pager) get(keys []connector.BlockKey, first int) []kvportv1.AgentPageResult {
	p.t.Helper()
	return p.getBy(keys, first, time.Minute)
}

func (p *pager) getBy(keys []connector.BlockKey, first int, deadline time.Duration) []kvportv1.AgentPageResult {
	p.t.Helper()
	for i := range p.mem {
		p.mem[i] = 0xA5
	}
	results := p.done(p.begin(true, keys, first, deadline))
	require.Len(p.t, results, len(keys))
	for page := range poolPages {
		want := bytes.Repeat([]byte{0xA5}, len(p.page(page)))
		if i := page - first; i >= 0 && i < len(keys) && results[i] == pageDone {
			want = p.content(keys[i])
		}
		require.Equal(p.t, want, p.page(page), "page %d", page)
	}
	return results
}

func all(n int, r kvportv1.AgentPageResult) []kvportv1.AgentPageResult {
	return bytesOf(n, func(int) kvportv1.AgentPageResult { return r })
}

func bytesOf[T any](n int, of func(int) T) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = of(i)
	}
	return out
}

// Pages come back in another engine, at other places; more of them than the agent has memory for.
func TestPagesComeBack(t *testing.T) {
	dir := t.TempDir()
	hs := hashes("a", 50)
	one := attachPager(t, open(t, config(dir, nil), nil).socket, pagesAt())
	one.announced(1)
	n, late := one.exists(hs)
	require.Zero(t, n)
	require.False(t, late)
	require.Equal(t, all(50, pageFailed), one.get(hs, 0))
	require.Equal(t, all(50, pageDone), one.put(hs, 3))
	n, _ = one.exists(hs)
	require.Equal(t, 50, n)
	require.Equal(t, all(50, pageDone), one.get(hs, 14))
	require.InDelta(t, 100, one.counts("kvport_agent_pages_total", 250)-150, 0, "asked twice, put once, loaded twice, 50 each")

	two := attachPager(t, open(t, config(dir, nil), nil).socket, pagesAt())
	n, _ = two.exists(append(hashes("a", 20), hashes("b", 1)...))
	require.Equal(t, 20, n)
	results := two.get(append(hashes("b", 1), hs[10:20]...), 0)
	require.Equal(t, append(all(1, pageFailed), all(10, pageDone)...), results, "nothing depends on the order")
}

// What an engine says about its pages decides who finds them; blocks of engines with a scheduler and ranks are apart.
func TestPagesOfOthers(t *testing.T) {
	dir := t.TempDir()
	hs := hashes("a", 4)
	mine := attachPager(t, open(t, config(dir, nil), nil).socket, pagesAt())
	require.Equal(t, all(4, pageDone), mine.put(hs, 0))
	for name, change := range map[string]func(*wire.AttachPages){
		"model":    func(a *wire.AttachPages) { a.Model[31] ^= 1 },
		"shape":    func(a *wire.AttachPages) { a.Shape[0] ^= 1 },
		"tokens":   func(a *wire.AttachPages) { a.Tokens = 32 },
		"segments": func(a *wire.AttachPages) { a.Lengths = []int64{1000, 300, 7} },
		"hashes":   func(a *wire.AttachPages) { a.Hashes = "other/sha256" },
	} {
		t.Run(name, func(t *testing.T) {
			a := pagesAt()
			change(a)
			p := attachPager(t, open(t, config(dir, nil), nil).socket, a)
			n, _ := p.exists(hs)
			require.Zero(t, n)
			require.Equal(t, all(4, pageFailed), p.get(hs, 0))
		})
	}

	// The same bytes in the same shape under the same hashes, but blocks.
	a := pagesAt()
	a.Lengths, a.Hashes, a.Tokens = []int64{blockBytes, blockBytes}, rankAt(0, 1).Hashes, blockTokens
	p := attachPager(t, open(t, config(dir, nil), nil).socket, a)
	require.Equal(t, all(4, pageDone), p.put(hs, 0))
	o := open(t, config(dir, nil), nil)
	w, s := worker(t, o.socket, rankAt(0, 1)), scheduler(t, o.socket)
	w.attached()
	require.Zero(t, s.match(query("r", hs)))
	other := hashes("b", 4)
	s.save(w, "s", other, 0)
	n, _ := p.exists(other)
	require.Zero(t, n)
}

// A damaged page is not loaded, is counted, and is replaced by the next put of it; so is one that is missing.
func TestPagesDamaged(t *testing.T) {
	dir := t.TempDir()
	hs := hashes("a", 10)
	p := attachPager(t, open(t, config(dir, nil), nil).socket, pagesAt())
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	require.Equal(t, all(10, pageDone), p.put(hs, 20), "again")
	var files []string
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if info, e := d.Info(); err == nil && e == nil && d.Type().IsRegular() && info.Size() > pagesAt().Bytes() {
			files = append(files, path)
		}
		return err
	}))
	require.Len(t, files, 10)
	for i, path := range files {
		if i%2 == 0 {
			require.NoError(t, os.Remove(path))
			continue
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		data[len(data)/2] ^= 1
		require.NoError(t, os.WriteFile(path, data, 0o600))
	}
	require.Equal(t, all(10, pageFailed), p.get(hs, 0))
	p.counts("kvport_integrity_failures_total", 5)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	require.Equal(t, all(10, pageDone), p.get(hs, 0))
	n, _ := p.exists(hs)
	require.Equal(t, 10, n)
}

// An engine that makes its memory smaller gets no pages; nobody ends.
func TestPagesMemoryShrinks(t *testing.T) {
	p := attachPager(t, open(t, config(t.TempDir(), nil), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	require.NoError(t, unix.Ftruncate(int(p.file.Fd()), 4096))
	require.Equal(t, all(10, pageMemoryGone), p.done(p.begin(true, hs, 30, time.Minute)))
	require.Equal(t, all(3, pageMemoryGone), p.done(p.begin(false, hashes("b", 3), 30, time.Minute)))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(p.file.Fd()), &st))
	require.Equal(t, int64(4096), st.Size, "it did not grow again")
	n, _ := p.exists(hs)
	require.Equal(t, 10, n)
}

// Whatever the plugin does, calls are answered by their deadline, or when they are aborted, and nothing is written
// to the engine's memory afterwards. Puts that hang keep no get from memory.
func TestPagesDeadlines(t *testing.T) {
	p := attachPager(t, open(t, config(t.TempDir(), map[string]any{"sandbox": "off"}), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	pidfd := p.announced(1)
	halt(t, pidfd)
	m := p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesExists{PagesExists: &kvportv1.AgentPagesExists{Keys: pack(hs), DeadlineMs: 50}}})
	require.True(t, m.GetPagesFound().GetLate())
	require.Zero(t, m.GetPagesFound().GetPages())

	other := hashes("b", 10)
	require.Equal(t, all(10, pageLate), p.done(p.begin(false, other, 0, 300*time.Millisecond)))
	put, get := p.begin(false, other, 0, time.Minute), p.begin(true, hs, 20, time.Minute)
	for i := range p.mem {
		p.mem[i] = 0xA5
	}
	for _, id := range []uint64{get, put} {
		m := p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesAbort{PagesAbort: &kvportv1.AgentPagesAbort{Call: id}}})
		require.True(t, m.GetPagesAborted().GetFound())
		require.Equal(t, all(10, pageLate), p.done(id))
	}
	require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGCONT, nil, 0))
	for range 20 {
		require.Equal(t, all(3, pageDone), p.done(p.begin(true, hs[:3], 40, time.Minute)), "the memory of calls that were given up is used again")
	}
	for page := range 40 {
		require.Equal(t, bytes.Repeat([]byte{0xA5}, len(p.page(page))), p.page(page), "page %d was written after its call was answered", page)
	}
	require.Equal(t, all(10, pageDone), p.get(hs, 0))
	require.Equal(t, all(10, pageDone), p.put(other, 0))
	m = p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesAbort{PagesAbort: &kvportv1.AgentPagesAbort{Call: get}}})
	require.False(t, m.GetPagesAborted().GetFound())
	for range 20 {
		require.Equal(t, all(10, pageDone), p.get(hs, 7), "no memory has gone")
	}
}

// faulty is a config of the connector of package host's own tests, with one fault.
func faulty(dir, fault string, at int) string {
	return fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, "fault": %q, "at": %d},
		"kvport": {"heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "save": "5m", "transfer": "5m"}}}`, dir, fault, at)
}

// A store that takes long over every question answers it all the same, within the question's deadline.
func TestPagesSlowAnswer(t *testing.T) {
	const takes = pagePatience + 200*time.Millisecond
	p := attachPager(t, open(t, fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, "match_ms": %d},
		"kvport": {"heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "later": "1m"}}}`, t.TempDir(), takes.Milliseconds()), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	n, late := p.exists(hs)
	require.Equal(t, 10, n)
	require.False(t, late)
}

// Puts that hang have no memory of gets.
func TestPagesPutsHang(t *testing.T) {
	p := attachPager(t, open(t, faulty(t.TempDir(), "hang_save", 4), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0), "in three saves")
	put := p.begin(false, hashes("b", 10), 20, time.Minute)
	for range 5 {
		require.Equal(t, all(10, pageDone), p.done(p.begin(true, hs, 0, time.Minute)))
	}
	require.True(t, p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesAbort{PagesAbort: &kvportv1.AgentPagesAbort{Call: put}}}).GetPagesAborted().GetFound())
	require.Equal(t, all(10, pageLate), p.done(put))
}

// A plugin that says that it has loaded what it has not is not believed.
func TestPagesLie(t *testing.T) {
	p := attachPager(t, open(t, faulty(t.TempDir(), "lie_load", 1), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	require.Equal(t, all(10, pageFailed), p.get(hs, 0))
	p.counts("kvport_integrity_failures_total", 10)
}

// No answer of a plugin is more pages than were asked for. A page of one token is a question's last token as well.
func TestPagesMoreThanAsked(t *testing.T) {
	a := pagesAt()
	a.Tokens = 1
	p := attachPager(t, open(t, faulty(t.TempDir(), "all", 1), nil).socket, a)
	hs := hashes("a", 10)
	n, late := p.exists(hs)
	require.Equal(t, 10, n)
	require.False(t, late)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
}

// A plugin that is killed costs at most what it was doing.
func TestPagesPluginKilled(t *testing.T) {
	p := attachPager(t, open(t, config(t.TempDir(), nil), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	pidfd := p.announced(1)
	halt(t, pidfd)
	id := p.begin(true, hs, 0, time.Minute)
	require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0))
	p.done(id)
	p.announced(2)
	require.Equal(t, all(10, pageDone), p.get(hs, 0))
}

// A question that a plugin dies over is answered then, and not at its deadline.
func TestPagesPluginKilledAmidQuestion(t *testing.T) {
	p := attachPager(t, open(t, config(t.TempDir(), nil), nil).socket, pagesAt())
	hs := hashes("a", 10)
	require.Equal(t, all(10, pageDone), p.put(hs, 0))
	pidfd := p.announced(1)
	halt(t, pidfd)
	p.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesExists{PagesExists: &kvportv1.AgentPagesExists{Keys: pack(hs), DeadlineMs: 60_000}}}, nil)
	require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0))
	m := p.answer(p.id)
	require.NotNil(t, m.GetPagesFound())
	require.False(t, m.GetPagesFound().GetLate())
}

// What does not fit is refused with its reason.
func TestPagesRefused(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	for name, c := range map[string]struct {
		change func(*kvportv1.AgentAttachPages)
		want   string
	}{
		"version":     {func(m *kvportv1.AgentAttachPages) { m.Version = 2 }, "attach_pages.version"},
		"engine":      {func(m *kvportv1.AgentAttachPages) { m.Engine = "" }, "attach_pages.engine"},
		"hashes":      {func(m *kvportv1.AgentAttachPages) { m.Hashes = "sglang/crc" }, "allow_weak_hashes"},
		"model":       {func(m *kvportv1.AgentAttachPages) { m.Model = nil }, "model has 0 bytes"},
		"tokens":      {func(m *kvportv1.AgentAttachPages) { m.PageTokens = 0 }, "attach_pages.page_tokens"},
		"one page":    {func(m *kvportv1.AgentAttachPages) { m.Pages = 1 }, "attach_pages.pages"},
		"no segments": {func(m *kvportv1.AgentAttachPages) { m.Lengths = nil }, "attach_pages.lengths"},
		"length":      {func(m *kvportv1.AgentAttachPages) { m.Lengths = []uint64{1, 0} }, "attach_pages.lengths[1]"},
	} {
		t.Run(name, func(t *testing.T) {
			p := dial(t, o.socket)
			m := attachPagesCall(pagesAt())
			c.change(m.GetAttachPages())
			require.Contains(t, p.call(m).GetError().GetMessage(), c.want)
			<-p.over
		})
	}
	large := pagesAt()
	large.Pages, large.Lengths = wire.MaxPages, []int64{wire.MaxArena / wire.MaxPages}
	require.Contains(t, dial(t, o.socket).call(attachPagesCall(large)).GetError().GetMessage(), "ask for fewer pages", "nobody is attached")
	one := attachPager(t, o.socket, pagesAt())
	require.Contains(t, dial(t, o.socket).call(attachPagesCall(pagesAt())).GetError().GetMessage(), "serves another process")
	require.Contains(t, dial(t, o.socket).call(attachPagesCall(large)).GetError().GetMessage(), "serves another process", "no memory was made for it")
	require.Contains(t, dial(t, o.socket).call(attachCall(&wire.Attach{Side: kvportv1.Side_SIDE_SCHEDULER, Engine: "p"})).GetError().GetMessage(), "stores pages for another process")
	n, _ := one.exists(hashes("a", 1))
	require.Zero(t, n, "it goes on")
	_ = one.conn.Close()
	<-one.over
	for name, c := range map[string]struct {
		change func(*kvportv1.AgentPagesGet)
		want   string
	}{
		"half a key": {func(m *kvportv1.AgentPagesGet) { m.Keys = m.GetKeys()[1:] }, "pages_get.keys"},
		"zero key":   {func(m *kvportv1.AgentPagesGet) { clear(m.GetKeys()) }, "pages_get.keys[0]"},
		"offsets":    {func(m *kvportv1.AgentPagesGet) { m.Offsets = m.GetOffsets()[1:] }, "pages_get.offsets has 2"},
		"beyond":     {func(m *kvportv1.AgentPagesGet) { m.Offsets[2] = poolPages*1307 - 6 }, "pages_get.offsets[2]"},
		"region":     {func(m *kvportv1.AgentPagesGet) { m.Region = 3 }, "pages_get.region 3"},
	} {
		t.Run(name, func(t *testing.T) {
			p := patientPager(t, o.socket)
			m := &kvportv1.AgentPagesGet{Keys: pack(hashes("a", 1)), Offsets: p.offsets(0)}
			c.change(m)
			require.Contains(t, p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesGet{PagesGet: m}}).GetError().GetMessage(), c.want)
			<-p.over
		})
	}
}

// The agent makes memory for one engine at a time.
func TestPagesAreReserved(t *testing.T) {
	s := &server{}
	require.NoError(t, s.reserve())
	require.ErrorIs(t, s.reserve(), connector.ErrBusy)
	s.unreserve()
	require.NoError(t, s.reserve())
	s.unreserve()
	s.seats = map[int]*seat{0: {}}
	require.ErrorIs(t, s.reserve(), connector.ErrBusy)
}

// patientPager attaches when the engine before it has left.
func patientPager(t *testing.T, socket string) *pager {
	t.Helper()
	p, refusal := nextPager(t, socket)
	require.Nil(t, refusal, refusal.GetMessage())
	return p
}

// nextPager attaches then, or says why it was refused.
func nextPager(t *testing.T, socket string) (*pager, *kvportv1.Error) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		p, refusal := tryPager(t, socket, pagesAt())
		if refusal.GetCode() != kvportv1.ErrorCode_ERROR_CODE_BUSY {
			return p, refusal
		}
		require.True(t, time.Now().Before(end), "the engine before never leaves")
	}
}

// The agent does not take the memory that others need: it would be allocated at once.
func TestPagesLeaveMemory(t *testing.T) {
	require.NoError(t, hasRoom(1<<30, 2<<30))
	require.ErrorContains(t, hasRoom(1<<30+1, 2<<30), "ask for fewer pages")
	require.ErrorIs(t, hasRoom(1, 0), connector.ErrIncompatible)
}

// A file is not taken for memory, nor more than there is.
func TestPagesRegionRefused(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	file, err := os.Open(os.DevNull) // a file of a tmpfs has seals, too
	require.NoError(t, err)
	defer file.Close()
	fd, err := unix.MemfdCreate("pool", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	memory := os.NewFile(uintptr(fd), "pool")
	defer memory.Close()
	require.NoError(t, memory.Truncate(4096))
	for want, c := range map[string]struct {
		file *os.File
		m    *kvportv1.AgentPagesRegion
	}{
		"not a memfd":                  {file, &kvportv1.AgentPagesRegion{Size: 4096}},
		"smaller than 8192 bytes":      {memory, &kvportv1.AgentPagesRegion{Size: 8192}},
		"region 16 of":                 {memory, &kvportv1.AgentPagesRegion{Size: 4096, Region: 16}},
		"region 0 of 0":                {memory, &kvportv1.AgentPagesRegion{}},
		"region 0 of 4096 bytes, want": {memory, &kvportv1.AgentPagesRegion{Size: 4096}},
		"did not come":                 {nil, &kvportv1.AgentPagesRegion{Size: 4096}},
	} {
		t.Run(want, func(t *testing.T) {
			p := patientPager(t, o.socket) // it has region 0
			if want == "not a memfd" || want == "smaller than 8192 bytes" {
				c.m.Region = 1
			}
			p.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_PagesRegion{PagesRegion: c.m}}, c.file)
			require.Contains(t, p.answer(p.id).GetError().GetMessage(), want)
			<-p.over
		})
	}
}

// Connectors that cannot keep pages are refused.
func TestPagesNeedAStore(t *testing.T) {
	for want, extra := range map[string]string{
		"stores none":          `"fault": "hold"`,
		"may load other bytes": `"lossy": true`,
	} {
		t.Run(want, func(t *testing.T) {
			o := open(t, fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, %s}, "kvport": {"allow_lossy": true}}`, t.TempDir(), extra), nil)
			require.Contains(t, dial(t, o.socket).call(attachPagesCall(pagesAt())).GetError().GetMessage(), want)
		})
	}
}
