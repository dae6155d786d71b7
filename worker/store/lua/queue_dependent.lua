-- Queue a job whose dependencies are met, unless whoever ended another of them has done so.
-- ended_id: of the job it waited for. at_front: 1 or 0.
local queue, id, ended_id, now_iso, at_front, now_ts = unpack(ARGV)
local job = 'rq:job:' .. id
call('SREM', 'rq:job:' .. ended_id .. ':dependents', id)
local fields = call('HMGET', job, 'status', 'ttl', 'rate_limit_key', 'rate_limit_concurrency')
if call('EXISTS', job) == 0 then return 0 end
if fields[1] == 'canceled' and call('ZSCORE', 'rq:canceled:' .. queue, id) then return 0 end
-- Who takes it from there has its turn: its status may be that of a copy that somebody saved.
if call('ZREM', 'rq:deferred:' .. queue, id) == 0 then return 0 end
call('SADD', 'rq:queues', 'rq:queue:' .. queue)
local key, concurrency = fields[3], fields[4]
if key and concurrency then
  call('SADD', 'rq:rl-keys', key)
  call('HSET', 'rq:rl:' .. key, 'concurrency', concurrency)
  call('HSET', job, 'status', 'rate_limited', 'enqueue_at_front', at_front)
  expire_in_queue(job, fields[2])
  call('ZADD', 'rq:rl:' .. key .. ':rate_limited', now_ts, id)
  let_in(key, now_iso)
  return 1
end
call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso)
expire_in_queue(job, fields[2])
call(at_front == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
return 1
