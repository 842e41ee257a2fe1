package host

import "time"

// Settings are the host's own settings: the object "kvport" of the transfer config.
type Settings struct {
	// TicketKeyFile signs tickets; empty: one that this user's engines on this machine share.
	TicketKeyFile string `json:"ticket_key_file" jsonschema:"description=The key that signs tickets; without it this user's engines on this machine share one."`
	// Peers are the ids of the engines whose tickets are accepted; empty: all that have the key.
	Peers []string `json:"peers" jsonschema:"description=The ids of the engines whose tickets are accepted; without it all that have the key."`
	Trust Trust    `json:"trust" jsonschema:"enum=in-place,enum=staged,description=in-place: the plugin maps the paged cache. staged: it maps landing memory."`
	// LandingBytes is the landing memory of each rank at trust level staged.
	LandingBytes int `json:"landing_bytes" jsonschema:"minimum=1,description=Landing memory of each rank at trust level staged."`
	// ArenaLimit is the most bytes that a connector may have as its arena; 0: what the machine has free.
	ArenaLimit int `json:"arena_limit" jsonschema:"minimum=1,description=The most bytes that a connector may have as memory that outlives it; without it what the machine has free." jsonschema_extras:"unit=bytes"`
	// PluginSHA256 is the hash that the plugin binary must have, in hex; empty: any.
	PluginSHA256 string `json:"plugin_sha256" jsonschema:"pattern=^[0-9a-fA-F]{64}$,description=The SHA-256 of the plugin binary in hex; without it any binary is run."`
	// TenantSecretFile makes digests and keys keyed MACs.
	TenantSecretFile string `json:"tenant_secret_file" jsonschema:"description=Makes keys and digests keyed ones."`
	// AllowLossy accepts a connector whose loaded bytes may differ from the saved ones.
	AllowLossy bool `json:"allow_lossy" jsonschema:"description=Accepts a connector whose loaded bytes may differ from the saved ones."`
	// Unverified accepts blocks of engines of other shapes, whose bytes no digest verifies.
	Unverified bool `json:"unverified" jsonschema:"description=Accepts blocks of engines with another block size or other ranks, whose bytes no digest verifies."`
	// Ring: small messages go through shared memory, if the plugin can; false: all over the stream.
	Ring bool `json:"ring" jsonschema:"description=Small messages go through shared memory, if the plugin can; false: all over the stream."`
	// AllowWeakHashes is the agent's: it accepts an engine whose block hashes could collide or differ between processes.
	AllowWeakHashes bool `json:"allow_weak_hashes" jsonschema:"description=agent: accepts an engine whose block hashes could collide or differ between processes."`
	// RecomputeThreshold is how many tokens an earlier turn's blocks must hold to be loaded: fewer are computed.
	RecomputeThreshold int       `json:"recompute_threshold" jsonschema:"minimum=1,description=Blocks of an earlier turn are loaded if they hold at least that many tokens that the engine lacks; else they are computed."`
	Deadlines          Deadlines `json:"deadlines"`
	Heartbeat          Heartbeat `json:"heartbeat"`
	Breaker            Breaker   `json:"breaker"`
}

// Trust says what a plugin may touch.
type Trust string

// The levels.
const (
	TrustInPlace Trust = "in-place" // the plugin maps the paged cache
	TrustStaged  Trust = "staged"   // it maps landing memory: the host copies saves out and verified loads in
)

// Deadlines bound every call. None may be zero.
type Deadlines struct {
	Handshake      time.Duration `json:"handshake"` // from start to the first answer
	Match          time.Duration `json:"match"`     // how long Match itself waits before it answers Later
	Later          time.Duration `json:"later"`     // how long a match may stay Later before it is a miss
	Transfer       time.Duration `json:"transfer"`  // a load, in addition to TransferPerGiB
	TransferPerGiB time.Duration `json:"transfer_per_gib"`
	Save           time.Duration `json:"save"`
	Plan           time.Duration `json:"plan"`
	Finish         time.Duration `json:"finish"`   // from the end of a request until its Finished
	Grace          time.Duration `json:"grace"`    // from a passed deadline until the plugin is killed
	Hold           time.Duration `json:"hold"`     // TTL of a hold that names none
	HoldMax        time.Duration `json:"hold_max"` // the longest TTL a plugin may ask for
	Fence          time.Duration `json:"fence"`    // how long a dead plugin's blocks wait for those that may still write them, before they are lost
	Drain          time.Duration `json:"drain"`    // how long Close waits for transfers
}

// Heartbeat says how a hung plugin is noticed.
type Heartbeat struct {
	Interval time.Duration `json:"interval"`
	Limit    time.Duration `json:"limit"` // a plugin that could have answered for so long and did not is killed; a busy machine stretches it up to four times
}

// Breaker says when a plugin that keeps dying is left alone.
type Breaker struct {
	Deaths     int           `json:"deaths" jsonschema:"minimum=1"`
	Window     time.Duration `json:"window"`
	Cooldown   time.Duration `json:"cooldown"`    // then one start is tried
	BackoffMin time.Duration `json:"backoff_min"` // wait before the first restart, doubled each time
	BackoffMax time.Duration `json:"backoff_max"`
}

// DefaultSettings are the defaults of every setting: the one place that has them.
func DefaultSettings() Settings {
	return Settings{
		Trust: TrustInPlace, LandingBytes: 64 << 20, Ring: true, RecomputeThreshold: 64,
		Deadlines: Deadlines{
			Handshake:      5 * time.Second,
			Match:          200 * time.Microsecond,
			Later:          2 * time.Second,
			Transfer:       5 * time.Second,
			TransferPerGiB: time.Second,
			Save:           30 * time.Second,
			Plan:           2 * time.Second,
			Finish:         5 * time.Second,
			Grace:          500 * time.Millisecond,
			Hold:           30 * time.Second,
			HoldMax:        10 * time.Minute,
			Fence:          5 * time.Second,
			Drain:          10 * time.Second,
		},
		Heartbeat: Heartbeat{Interval: 250 * time.Millisecond, Limit: 2 * time.Second},
		Breaker: Breaker{
			Deaths: 5, Window: 30 * time.Second, Cooldown: 30 * time.Second,
			BackoffMin: 10 * time.Millisecond, BackoffMax: time.Second,
		},
	}
}

// Bounds that are not settings.
const (
	maxConfigBytes = 4 << 20                // of a transfer config
	maxCorruptKeys = 1 << 16                // damaged keys remembered until they are saved again
	maxAsks        = 64                     // queries of one Match call
	matchFresh     = 250 * time.Millisecond // an answer may be used again this long
	firstRetry     = 5 * time.Millisecond   // after ErrBusy and Later, doubled each time
	slowestRetry   = 200 * time.Millisecond
	readerWait     = time.Second      // for the last events to be read
	missedEvery    = 10 * time.Second // a warning about matches that stayed undecided
	statsEvery     = time.Second      // a connector is asked for its numbers
	statsWait      = time.Second      // for them
)
